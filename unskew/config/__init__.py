"""The validated description of a run."""
