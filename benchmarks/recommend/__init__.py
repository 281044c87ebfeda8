"""Retrieval from large catalogues, and the cascade over HTTP: exactness, time, memory, p99."""
