"""Fedssyn: synthetic data shuffling."""
