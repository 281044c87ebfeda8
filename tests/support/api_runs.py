"""Tiny logs with ids of each type, and runs trained on them through the Python functions."""

import random
from collections.abc import Sequence
from pathlib import Path

import polars as pl

import slipstream as ss

TINY = {"model": {"dim": 8, "blocks": 1, "heads": 1}, "train": {"epochs": 2, "threads": 1}}
IDS: dict[str, tuple[list[int] | list[str], list[int] | list[str]]] = {
    "numbers": (
        [-(2**63), -7, 0, 5, 2**53 + 1, 2**63 - 1, 42, 10**15 + 17],
        [-(2**62) + n * (2**53 + 1) for n in range(12)],
    ),
    "text": (
        ["c/1", "ünï code", "00042", " x", "a'b", "日本", "-", "c/2"],
        [f"{kind}/{n:02d}" for n in range(3) for kind in ("LAM", "ß", "🦊", "42")],
    ),
}


def shop_frame(
    users: Sequence[int] | Sequence[str], items: Sequence[int] | Sequence[str], seed: int = 0
) -> pl.DataFrame:
    """A log in which every user has 6 to 10 behaviours and every item occurs."""
    draw, rows = random.Random(seed), []
    for place, user in enumerate(users):
        chosen = [items[(place + n * 5) % len(items)] for n in range(6 + place % 5)]
        draw.shuffle(chosen)
        rows += [(user, item, 1_000 + 60 * n, n % 2) for n, item in enumerate(chosen)]
    schema = ["customer", "sku", "when", "liked"]
    return pl.DataFrame(rows, schema=schema, orient="row")


def prepare_and_train(place: Path, kind: str = "numbers", **settings: object) -> ss.Run:
    """Prepare a frame with ids of one type and train on it; titles are there for text."""
    users, items = IDS[kind]
    titles = pl.DataFrame({"sku": items, "name": [f"Title of {item}" for item in items]})
    more = {"items": titles, "item_title": "name"} if kind == "text" else {}
    store = ss.prepare(
        shop_frame(users, items),
        place / "store",
        user="customer",
        item="sku",
        time="when",
        actions="liked",
        quiet=True,
        **more,
    )
    return ss.train(store, out=place / "run", quiet=True, **(TINY | settings))
