"""Version of unskew."""

__version__ = "0.2.0"
