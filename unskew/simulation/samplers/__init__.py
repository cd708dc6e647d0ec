"""Samplers: how the clients of each round are drawn."""
