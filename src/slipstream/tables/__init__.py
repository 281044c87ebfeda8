"""Embedding rows with their optimiser state."""
