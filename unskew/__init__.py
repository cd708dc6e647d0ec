"""unskew: federated learning for skewed data."""
