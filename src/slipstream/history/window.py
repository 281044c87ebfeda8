"""Where a history longer than the model is cut. Touch this when the rule of the cut changes."""

PARTS = 8  # the cut lies at a multiple of this part of the model's length


def window_start(behaviours: int, max_len: int, oldest: int = 0) -> int:
    """Return the first behaviour a model of length `max_len` sees, of those from `oldest` on.

    It is the smallest multiple of `max_len / 8` that leaves at most `max_len` behaviours. So the
    window stays put while a history grows and prefixes stay usable; a model sees between 7/8 of
    `max_len` and all of it.
    """
    block = max(1, max_len // PARTS)
    beyond = max(behaviours - max_len, oldest)
    return min(behaviours, -(-beyond // block) * block)
