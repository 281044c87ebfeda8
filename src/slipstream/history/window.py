"""Where a history longer than the model is cut. Touch this when the rule of the cut changes."""

PARTS = 8  # the stepped cut lies at a multiple of this part of the model's length
RULES = ("latest", "stepped")


def window_start(behaviours: int, max_len: int, oldest: int = 0, rule: str = "stepped") -> int:
    """Return the first behaviour a model of length `max_len` sees, of those from `oldest` on.

    `latest`: the model sees exactly the latest `max_len` behaviours. `stepped`: the cut is the
    smallest multiple of `max_len / 8` that leaves at most `max_len` behaviours. So the window stays
    put while a history grows and prefixes stay usable; a model sees between 7/8 of `max_len` and
    all of it.
    """
    if rule not in RULES:
        raise ValueError(f"'{rule}' is no rule of the window; choose one of {', '.join(RULES)}")
    beyond = max(behaviours - max_len, oldest)
    if rule == "latest":
        return min(behaviours, beyond)
    block = max(1, max_len // PARTS)
    return min(behaviours, -(-beyond // block) * block)
