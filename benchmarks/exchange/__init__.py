"""Bytes and time of the key, row and gradient exchange, against TorchRec."""
