"""Slipstream trains and serves generative recommenders: the slow thing early, in the slipstream of the work before it."""

__version__ = "0.1.0"
