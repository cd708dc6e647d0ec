"""Diagnosis of a federation's skew and of the effect of synthetic data, with advice on methods."""
