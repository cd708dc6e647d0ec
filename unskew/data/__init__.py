"""Data sources, partitions, and transformations of batches."""
