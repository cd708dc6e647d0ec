"""What theory talks about, measured in a run."""
