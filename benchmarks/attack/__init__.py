"""Honest users of `slipstream serve` while others attack it."""
