"""Factors: weights as products of smaller ones, how they are found, and how they are kept."""
