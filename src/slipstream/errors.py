"""The one exception meant for users: a sentence that says what is wrong and what to do.

Commands print it as `error: …` and exit with 1, without a traceback. Any other exception that
reaches the user is a bug.
"""

import difflib
from collections.abc import Iterable


class SlipstreamError(Exception):
    """Something that the user can correct; the message says how."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'schedule'?` for a similar word, otherwise all choices."""
    choices = sorted(known)
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f"; did you mean '{near[0]}'?" if near else f"; choose one of {', '.join(choices)}"
