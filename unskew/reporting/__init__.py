"""One page of what runs did: curves, who holds what, tables, methods, and how to repeat it."""
