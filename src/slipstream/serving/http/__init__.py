"""Serving: http."""
