"""Readers that load files as tensors."""
