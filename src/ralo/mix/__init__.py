"""Mixed precision: weights of fewer bits that stand in for a model's own at some places."""
