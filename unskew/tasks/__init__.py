"""What a model is trained for: the loss, the beliefs that a model's outputs express, and the figures that a task reports."""
