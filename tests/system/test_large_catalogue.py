"""Tables on disk, the whole way by commands: every answer is that of tables in memory."""

import json
from pathlib import Path

import polars as pl
import pytest

from benchmarks.large_catalogue import write_log, write_recipe
from slipstream.bundle import ITEMS, SEARCH, WEIGHTS
from slipstream.cli.app import run_command
from slipstream.history.user_history import History
from slipstream.serving.engine.engine import Engine
from slipstream.serving.http.client import Client
from tests.system.test_serve_command import KEY, served

COUNT = 60_000  # enough items for a search by 8-bit codes
DISK = {"tier": "disk", "cache_bytes": 1 << 20}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store, and the same recipe trained and exported with tables in memory and on disk."""
    place = tmp_path_factory.mktemp("catalogue")
    write_log(place / "log.parquet", COUNT)
    prepare = ["data", "prepare", str(place / "log.parquet"), "--out", str(place / "store")]
    assert run_command(prepare) == 0
    for name, tables in (("memory", {}), ("disk", DISK | {"directory": str(place / "tables")})):
        write_recipe(place / f"{name}.yaml", 4, tables, test=0.05)
        recipe, run = str(place / f"{name}.yaml"), str(place / name)
        changes = [f"data={place / 'store'}", "model.dim=16", "threads=1"]
        assert run_command(["train", recipe, *changes, "--out", run]) == 0
        assert run_command(["export", run, "--out", str(place / f"bundle-{name}")]) == 0
    return place


def test_evaluate_and_recommend_are_equal_to_the_last_bit(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for name in ("memory", "disk"):
        run, out = str(place / name), str(place / f"{name}.parquet")
        capsys.readouterr()
        assert run_command(["evaluate", run, "--json"]) == 0
        figures = json.loads(capsys.readouterr().out)["figures"]
        assert run_command(["recommend", run, "--all", "--out", out, "--count", "7"]) == 0
        found.append((figures, pl.read_parquet(out)))
    assert found[0][0] == found[1][0] and found[0][0]["users"] > 10
    assert found[0][1].equals(found[1][1]) and len(found[0][1]) == COUNT // 100
    assert not list(place.rglob(".opened-rows-*"))


def test_the_bundle_is_the_same_and_serves_the_same(place: Path) -> None:
    memory, disk = place / "bundle-memory", place / "bundle-disk"
    for name in (WEIGHTS, SEARCH, ITEMS):
        assert (memory / name).read_bytes() == (disk / name).read_bytes(), name
    engine = Engine(memory)
    history = {"items": [5, 59_999, 123], "timestamps": [1, 2, 3]}
    expected, scores = engine.retrieve(History([5, 59_999, 123], [1, 2, 3]), 10)
    with served(disk) as (url, _), Client(url, key=KEY) as client:
        answer = client.recommend("ann", 10, history=history)
    assert answer.version == engine.version == Engine(disk).version
    assert list(answer.items) == expected
    assert list(answer.scores["score"]) == pytest.approx(scores, abs=1e-6)
