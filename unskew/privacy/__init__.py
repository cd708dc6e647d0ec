"""Privacy accounting of client-level Gaussian mechanisms."""
