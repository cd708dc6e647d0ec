"""Version of unskew."""

__version__ = "0.1.0"
