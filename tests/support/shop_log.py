"""A shop's log as shops write them: text SKUs, ISO times, text actions, nulls, duplicates, prices.

`write_shop` writes `events.csv` and `items.csv`. A customer returns to one or two categories, and
about three in ten purchases repeat an earlier item, so a model that reads histories beats
popularity, and it matters whether repeats are allowed.
"""

import csv
import random
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

CATEGORIES = ("lamps", "chairs", "rugs", "mugs", "plants", "clocks")
COLOURS = ("red", "blue", "green", "oak", "white")
START = datetime(2026, 3, 1, 8, 0, tzinfo=UTC)


@dataclass(frozen=True)
class Shop:
    """The two files, and what a preparation of them must report."""

    events: Path
    items: Path
    rows: int  # rows of events.csv
    nulls: int  # rows that lack a customer, an item or a time
    duplicates: int  # rows that repeat an earlier row exactly


def sku(number: int) -> str:
    """The SKU of a product: text that looks like no number, with a slash in some."""
    return f"{CATEGORIES[number % len(CATEGORIES)][:3].upper()}/{number:04d}-X"


def write_shop(directory: Path, customers: int = 300, products: int = 120, seed: int = 7) -> Shop:
    """Write events.csv (customer, sku, when, what, price) and items.csv (sku, name, …)."""
    draw = random.Random(seed)
    directory.mkdir(parents=True, exist_ok=True)
    items, events = directory / "items.csv", directory / "events.csv"
    prices = {number: round(draw.lognormvariate(3, 0.8), 2) for number in range(products)}
    with items.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["sku", "name", "category", "colours", "price"])
        for number in range(products):
            category = CATEGORIES[number % len(CATEGORIES)]
            colours = "|".join(sorted(draw.sample(COLOURS, draw.randint(1, 3))))
            name = f"{category[:-1].title()} No. {number}"
            rows.writerow([sku(number), name, category, colours, prices[number]])
    log = _events(draw, customers, products, prices)
    nulls = 0
    for place in range(25, len(log), 97):  # a null now and then, in turn of customer, item, time
        log[place][nulls % 3] = ""
        nulls += 1
    repeated = [list(row) for row in log[::211] if all(row[:3])]
    log += repeated
    with events.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, delimiter=";")
        rows.writerow(["customer", "sku", "when", "what", "price"])
        rows.writerows(log)
    return Shop(events, items, len(log), nulls, len(repeated))


def _events(
    draw: random.Random, customers: int, products: int, prices: dict[int, float]
) -> list[list[object]]:
    """All behaviours, ordered by time."""
    log: list[tuple[datetime, list[object]]] = []
    for customer in range(customers):
        now = START + timedelta(minutes=draw.randrange(100_000))
        tastes = draw.sample(range(len(CATEGORIES)), draw.randint(1, 2))
        bought: list[int] = []
        for _ in range(draw.randint(4, 30)):
            now += timedelta(minutes=draw.randint(1, 3_000))
            number = draw.choice(tastes) + len(CATEGORIES) * min(
                int(draw.expovariate(0.25)), products // len(CATEGORIES) - 1
            )
            if bought and draw.random() < 0.3:
                number = draw.choice(bought)
            bought.append(number)
            what = draw.choices(["view", "cart", "buy"], weights=[6, 2, 1])[0]
            when = now.strftime("%Y-%m-%dT%H:%M:%SZ")
            log.append((now, [f"c/{customer:04d}", sku(number), when, what, prices[number]]))
    return [row for _, row in sorted(log, key=lambda pair: pair[0])]
