"""Data sources, data partitions, and batch transformations."""
