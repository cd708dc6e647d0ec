"""Feddle: federated dual learning."""
