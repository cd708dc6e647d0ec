"""Programs that run inside Flower's processes: they relay messages, and need neither PyTorch nor data."""
