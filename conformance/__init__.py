"""Whether libraries of federated learning compute what the papers say, on a problem small enough to know the answer."""
