"""Engines: ways to run the local training of a cohort, all with the same numbers."""
