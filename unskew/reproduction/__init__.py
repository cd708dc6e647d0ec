"""Reproduction of the papers' tables and figures: presets at three scales, and stored results."""
