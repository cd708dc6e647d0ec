"""Validated experiment configuration."""
