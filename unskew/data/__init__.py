"""Where samples come from, how they are split over clients, and what is done to a batch."""
