"""Serving whose processes are killed and drained under load."""
