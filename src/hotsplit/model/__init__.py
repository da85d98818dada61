"""Declares what a model is: its layers, its rotary embeddings, what is not supported."""
