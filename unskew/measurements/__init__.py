"""Diagnostics: quantities of the theory, measured during a run."""
