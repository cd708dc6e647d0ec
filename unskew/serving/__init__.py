"""A trained model in use: its preprocessing, its predictions for new rows, images and texts."""
