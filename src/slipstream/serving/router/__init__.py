"""Serving: router."""
