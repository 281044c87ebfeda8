"""Jagged operators: one Python signature each, back-ends reference, native and triton."""
