"""What makes synthetic data."""
