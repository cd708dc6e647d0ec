"""Inference and export of trained models."""
