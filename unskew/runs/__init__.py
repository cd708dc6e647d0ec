"""A run: its data, model, method and checks, and the session that carries it out."""
