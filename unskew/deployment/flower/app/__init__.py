"""What runs inside Flower's own processes: it hands messages on and needs neither PyTorch nor data."""
