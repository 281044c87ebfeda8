"""Serving: instance."""
