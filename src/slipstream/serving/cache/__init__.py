"""Serving: cache."""
