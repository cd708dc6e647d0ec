"""Attackers of a simulation: clients that train on changed data or send changed updates."""
