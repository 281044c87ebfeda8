"""A process that demotes prefixes to a shelf until it is killed: `BUNDLE SHELF` are its arguments.

It prints a line after every demotion, so that a test can kill it while the next one is under way.
"""

import sys
from pathlib import Path

from slipstream.serving.cache.expander import Expander
from slipstream.serving.engine.engine import Engine
from tests.support.serving_samples import history

USERS, BYTES = 6, 3 << 19


def demote(expander: Expander, user: str, whole) -> None:
    """Compute the prefix of a history and store it on the shelf."""
    prefix = expander.engine.prefill(whole)
    demotion = expander.begin(prefix.key(user), prefix)
    assert demotion is not None
    for _ in demotion.steps():
        pass
    expander.finish(demotion)


def history_of(number: int):
    """The history of a user of this process."""
    return history(40 + number, seed=number)


def main(bundle: str, shelf: str) -> None:
    expander = Expander(Engine(bundle), Path(shelf), BYTES)
    demoted = 0
    while True:
        number = demoted % USERS
        whole = history_of(number)
        if not expander.has(expander.engine.prefill(whole).key(str(number))):
            demote(expander, str(number), whole)
        demoted += 1
        print(demoted, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
