"""Comparison of several methods on the same data."""
