"""Grouped networks, which run several clients as one network."""
