"""Federations, and how they are built from data sources, data partitions and splits; augmentation and normalization."""
