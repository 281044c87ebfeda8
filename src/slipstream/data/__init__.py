"""Jagged data: ingest, the sequence store, batches and the sampler."""
