"""Secure aggregation (SecAgg+): keys, masks, shares and the opened sum."""
