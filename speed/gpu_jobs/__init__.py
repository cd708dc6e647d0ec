"""Jobs for a machine with a CUDA device; README.md has their list and results."""
