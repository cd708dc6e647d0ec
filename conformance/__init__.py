"""Suite that tests whether federated learning libraries match the papers, on a problem with a known solution."""
