"""Several methods on the same data, side by side."""
