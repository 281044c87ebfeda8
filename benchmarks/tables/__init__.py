"""Gather and update of embedding rows, against torch and FBGEMM."""
