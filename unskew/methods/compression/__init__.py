"""Compression of uploads: sparse, quantized and low-rank codes of vectors."""
