"""Serving: engine."""
