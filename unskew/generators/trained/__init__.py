"""Generators that a client trains on its data."""
