"""Records of a run: metrics, tables, plots."""
