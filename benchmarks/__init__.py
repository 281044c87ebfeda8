"""Comparisons with peers and studies; not installed."""
