"""Flower integration: its programs, and the bridge to its grid."""
