"""Folds over a model and a plan: bytes, kernel launches, and the mode that they favour."""
