"""A run whose rows are in files opens without a row in memory, and answers as one in memory."""

import fcntl

import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.tables.disk_table import DiskTable
from slipstream.tables.hashed_table import HashedTable
from slipstream.training import opened_rows, run
from slipstream.training.evaluation import evaluate_in_detail
from slipstream.training.recommendation import recommend, similar_items
from slipstream.training.run import open_run, train
from tests.support.training_fixtures import small_recipe, small_store

FILES = {"tier": "disk", "optimizer": "rowwise_adagrad", "cache_bytes": 1 << 16}
MEMORY = {"optimizer": "rowwise_adagrad"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The same recipe trained with rows in memory and in files."""
    place = tmp_path_factory.mktemp("runs")
    store = small_store(place / "store", items=2_000, users=40)
    for name, tables in (("memory", MEMORY), ("files", FILES | {"directory": str(place / "t")})):
        train(small_recipe(tables=tables), store, place / name, quiet=True)
    return place


def left_in(place):
    return [path.name for path in place.rglob(f"{opened_rows.PREFIX}*")]


def test_rows_in_files_answer_as_rows_in_memory_bit_for_bit(place):
    recipe, store, memory = open_run(place / "memory")
    *_, files = open_run(place / "files")
    assert isinstance(files.tables["item"], DiskTable) and not left_in(place)
    users = range(store.num_users)
    assert recommend(files, store, users, 20) == recommend(memory, store, users, 20)
    found = [evaluate_in_detail(each, store, recipe, "test") for each in (memory, files)]
    assert found[0] == found[1]
    for left, right in zip(*(similar_items(each, [3, 9]) for each in (memory, files)), strict=True):
        assert torch.equal(left, right)
    assert files.recipe.tables.directory is None  # nor does a bundle name one


def test_hashed_rows_in_files_open_in_files(tmp_path):
    store = small_store(tmp_path / "store")
    tables = FILES | {"tier": "hashed", "directory": str(tmp_path / "t")}
    train(small_recipe(tables=tables), store, tmp_path / "run", quiet=True)
    *_, opened = open_run(tmp_path / "run")
    table = opened.tables["item"]
    assert isinstance(table, HashedTable) and isinstance(table.storage, DiskTable)
    assert opened.item_vectors_CD(torch.arange(15)).shape == (15, 8)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SlipstreamError])
def test_nothing_is_left_behind_by_an_error(place, monkeypatch, error):
    def fail(path, recommender):
        assert left_in(place)
        raise error("stopped")

    monkeypatch.setattr(run, "load_weights", fail)
    with pytest.raises(error):
        open_run(place / "files")
    assert not left_in(place)


def test_what_a_killed_process_left_is_removed_unless_it_is_in_use(place):
    dead, alive = (place / "t" / f"{opened_rows.PREFIX}{name}" for name in ("dead", "alive"))
    for directory in (dead, alive):
        directory.mkdir()
        (directory / "in-use").touch()
    with (alive / "in-use").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        open_run(place / "files")
        assert not dead.exists() and alive.exists()
    open_run(place / "files")
    assert not alive.exists()
