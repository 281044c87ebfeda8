"""Processor time per routed request, against sglang-router."""
