"""Models as flat vectors, and the registry of reference architectures."""
