"""Robust aggregation: rules of the ``aggregate`` slot that limit the influence of single clients."""
