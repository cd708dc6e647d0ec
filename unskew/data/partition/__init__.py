"""Partitions of samples among clients."""
