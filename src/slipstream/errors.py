"""The one exception a user meets: a sentence that says what is wrong and what to do.

Commands print it as `error: …` and exit with 1, without a traceback. Anything else that escapes is
a bug of ours.
"""

import difflib
from collections.abc import Iterable


class SlipstreamError(Exception):
    """Something the user can put right; the message says how."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'schedule'?` for a near miss, otherwise the choices, ready to be appended to
    a message.
    """
    choices = sorted(known)
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f"; did you mean '{near[0]}'?" if near else f"; choose one of {', '.join(choices)}"
