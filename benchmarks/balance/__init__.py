"""How long ranks wait for the slowest one, with and without balancing."""
