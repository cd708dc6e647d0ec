"""Engine that trains clients on a Ray cluster."""
