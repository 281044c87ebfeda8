"""What stale rows do to quality, over seeds."""
