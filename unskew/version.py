"""Version of unskew."""

__version__ = "0.3.0"
