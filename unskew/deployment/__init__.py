"""Deployment on real machines: train a simulated method across sites, over Flower."""
