"""Diagnostics: quantities of convergence theory, measured during a run."""
