"""The rows of items and users: one, or the mean of several, as a plain loop would take them."""

from pathlib import Path

import torch

from slipstream.bundle import Bundle
from slipstream.serving.engine.feature_rows import FeatureRows

TABLES = {
    name: torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
    for name, rows in {"item": 3, "item.genre": 5, "item.colours": 6, "user.age": 7}.items()
}
CODES = {"genre": torch.tensor([4, 0, 2]), "colours": torch.tensor([5, 1, 0, 2, 2, 3])}
OFFSETS_N1 = torch.tensor([0, 2, 3, 6])
TENSORS = (
    {f"tables/{name}": rows for name, rows in TABLES.items()}
    | {f"codes/{name}": codes for name, codes in CODES.items()}
    | {"offsets/colours": OFFSETS_N1}
)
ROWS = FeatureRows(Bundle(Path("nowhere"), {}, TENSORS))


def test_items_read_their_row_that_of_a_category_and_the_mean_of_several():
    found = ROWS.of_items(torch.tensor([2, 0, 2, 1]))
    colours = TABLES["item.colours"]
    means = [colours[[5, 1]].mean(0), colours[0], colours[[2, 2, 3]].mean(0)]
    assert torch.equal(found["item"], TABLES["item"][[2, 0, 2, 1]])
    assert torch.equal(found["item.genre"], TABLES["item.genre"][[2, 4, 2, 0]])
    assert torch.allclose(found["item.colours"], torch.stack([means[i] for i in (2, 0, 2, 1)]))
    assert ROWS.of_items(torch.empty(0, dtype=torch.int64))["item.colours"].shape == (0, 4)


def test_users_read_one_row_or_the_mean_of_several():
    age = TABLES["user.age"]
    plain = ROWS.of_users(["age"], [{"age": 3}, {"age": 0}])["user.age"]
    assert torch.equal(plain, age[[3, 0]])
    several = ROWS.of_users(["age"], [{"age": (3, 5)}, {"age": (0,)}, {"age": 6}])["user.age"]
    assert torch.allclose(several, torch.stack([age[[3, 5]].mean(0), age[0], age[6]]))
