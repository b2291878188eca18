"""Procedural weights: seeds that a generator turns into weights, how they are found, and how they are kept."""
