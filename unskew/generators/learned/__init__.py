"""Inputs that are learned from a model."""
