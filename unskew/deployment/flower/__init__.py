"""Flower's programs and the bridge to its grid."""
