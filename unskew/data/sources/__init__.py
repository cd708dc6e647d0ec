"""Data sources and their registry."""
