"""Server side of a deployed run."""
