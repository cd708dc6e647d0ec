"""Inference of a first configuration from the data of a user."""
