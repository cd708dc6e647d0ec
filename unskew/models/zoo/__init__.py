"""Models that come with unskew."""
