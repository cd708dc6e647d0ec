"""What a run leaves behind: metrics, tables, plots."""
