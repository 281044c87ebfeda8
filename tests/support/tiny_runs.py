"""A log with the largest ids and a run trained on it in a second, through the commands."""

import csv
from pathlib import Path

from slipstream.cli.app import run_command

BIG = 2**63 - 1  # original ids go up to here
TINY = (
    "model.dim=8",
    "blocks=1",
    "heads=1",
    "epochs=2",
    "threads=1",
    "negatives=4",
    "sampler.batch_size=8",
)


def write_log(path: Path, users: int = 20, actions: tuple[str, ...] = ()) -> None:
    """Write a CSV log in which user u is `BIG - u` and has 4 to 8 behaviours."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["user_id", "item_id", "timestamp", *actions])
        for user in range(users):
            for place in range(4 + user % 5):
                flags = [(user + place) % 2 for _ in actions]
                item = BIG - (user * 3 + place * 7) % 40
                rows.writerow([BIG - user, item, 1000 + place, *flags])


def prepare_store(place: Path, *flags: str) -> Path:
    """Prepare `place`/log.csv as `place`/store with `slipstream data prepare`."""
    words = ["data", "prepare", str(place / "log.csv"), "--out", str(place / "store"), *flags]
    assert run_command(words) == 0
    return place / "store"


def train_tiny(place: Path, *overrides: str) -> Path:
    """Train `place`/run on `place`/store with `slipstream train`."""
    words = ["train", "ml-1m-hstu", f"data={place / 'store'}", *TINY, *overrides]
    assert run_command([*words, "--out", str(place / "run")]) == 0
    return place / "run"


def prepare_and_train(place: Path) -> Path:
    """Write a log, prepare it and train on it; returns `place`."""
    write_log(place / "log.csv")
    prepare_store(place)
    train_tiny(place)
    return place
