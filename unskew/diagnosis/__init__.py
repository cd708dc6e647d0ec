"""The command that measures how skewed a federation is, and what synthetic data would change."""
