"""Secure aggregation (SecAgg+): keys, masks, shares and the unmasked sum."""
