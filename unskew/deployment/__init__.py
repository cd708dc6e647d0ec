"""On real machines: the method that was simulated trains across sites, over Flower."""
