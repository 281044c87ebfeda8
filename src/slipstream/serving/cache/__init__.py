"""Prefixes of one instance: the device tier, the host tier, and what is being computed now.

    arena.py         one preallocated block of memory, divided into pieces
    prefix_cache.py  the device tier: entries by key, leases, pins, eviction
    shelf.py         a file in shared memory that outlives the process
    expander.py      the host tier: prefixes on a shelf
    inflight.py      every prefix is computed once, however many requests need it

Touch this when prefixes are kept, evicted or reloaded in another way.
"""
