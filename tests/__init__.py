"""Tests by room."""
