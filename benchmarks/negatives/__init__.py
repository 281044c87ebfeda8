"""What negatives cost in a whole training step."""
