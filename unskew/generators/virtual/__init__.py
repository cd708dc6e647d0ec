"""Virtual sets of noise."""
