"""Benchmark of methods on many federations, each method tuned with the same budget."""
