"""One page of what runs did: curves, data partition, tables, methods, and how to repeat it."""
