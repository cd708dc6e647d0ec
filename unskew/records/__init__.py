"""Records of a run: history, summary, trackers and results."""
