"""What each way of choosing negatives is worth, over seeds."""
