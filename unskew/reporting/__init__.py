"""HTML reports on runs: curves, data partition, tables, methods, and commands to repeat the runs."""
