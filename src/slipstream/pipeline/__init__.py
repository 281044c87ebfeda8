"""Schedules of a training step as data: stages, lanes, hazards, one engine, and the trace of what
ran when.
"""
