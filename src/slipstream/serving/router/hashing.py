"""Rendezvous hashing, a form of consistent hashing: each user has an own order of the nodes.

Every router computes the same order from the names of the nodes alone. Adding or removing a node
changes the first node of that node's users only. Touch this when users are spread in another way.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import xxhash

Node = TypeVar("Node")


def seed_of(name: str) -> int:
    """The seed under which a node of this name hashes users."""
    return xxhash.xxh3_64_intdigest(name.encode())


def rendezvous_first(user: str, nodes: Sequence[Node], seed: Callable[[Node], int]) -> Node:
    """The first node of this user's order, without ordering the others."""
    key = user.encode("utf-8", "surrogatepass")
    digest = xxhash.xxh3_64_intdigest
    hashes = [digest(key, each) for each in map(seed, nodes)]
    return nodes[hashes.index(max(hashes))]


def rendezvous_order(user: str, nodes: Iterable[Node], seed: Callable[[Node], int]) -> list[Node]:
    """The nodes in this user's order, the highest hash first; `seed` gives the seed of a node."""
    key = user.encode("utf-8", "surrogatepass")
    digest = xxhash.xxh3_64_intdigest
    return sorted(nodes, key=lambda node: digest(key, seed=seed(node)), reverse=True)
