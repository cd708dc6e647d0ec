"""Federated sums: statistics of all clients as sums of what each client computes from its rows."""
