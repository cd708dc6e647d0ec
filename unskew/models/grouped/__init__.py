"""Several clients as one grouped network."""
