"""The models that come with unskew."""
