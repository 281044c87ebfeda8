"""A benchmark."""
