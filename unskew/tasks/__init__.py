"""Training tasks: loss, probabilities and metrics."""
