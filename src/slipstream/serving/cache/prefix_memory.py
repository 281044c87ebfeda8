"""The memory of both tiers of prefixes: an arena on the device, a shelf on the host.

A simulation hands over memory that has sizes only, so that the classes which decide what is kept
run unchanged. Touch this when a tier lies in another kind of memory.
"""

import os

from slipstream.serving.cache.arena import Arena
from slipstream.serving.cache.shelf import Shelf


class PrefixMemory:
    """This machine's memory."""

    def arena(self, nbytes: int) -> Arena:
        """Return the memory of the device tier."""
        return Arena(nbytes)

    def open_shelf(self, path: str | os.PathLike[str], nbytes: int, identity: bytes) -> Shelf:
        """Return the shelf of the host tier."""
        return Shelf(path, nbytes, identity)


PREFIX_MEMORY = PrefixMemory()
