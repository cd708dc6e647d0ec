"""Site side of a deployed run."""
