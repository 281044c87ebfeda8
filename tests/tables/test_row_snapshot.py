"""A snapshot holds the rows of one moment, whatever the table does while it is read."""

import threading

import numpy as np
import pytest
import torch

from slipstream.tables.factory import make_table
from slipstream.tables.row_optimizers import RowwiseAdagrad, RowwiseAdam
from slipstream.tables.row_snapshot import RowBuffers
from slipstream.tables.slices import Placement

ROWS, DIM, MANY = 300, 4, 1 << 20
KINDS = {
    "memory": {"tier": "memory"},
    "a part in memory": {"tier": "memory", "placement": Placement(2), "rank": 1},
    "disk": {"tier": "disk", "cache_bytes": 4096},
    "hashed": {"tier": "hashed"},
    "hashed, evicting": {"tier": "hashed", "max_rows": 120, "admit_after": 2},
    "hashed on disk": {"tier": "hashed", "max_rows": 120, "cache_bytes": 4096},
}


class Trained:
    """A table with steps of random keys."""

    def __init__(self, kind, directory, seed=0):
        options = dict(KINDS[kind])
        if "disk" in kind:
            options["directory"] = directory
        self.table = make_table(
            options.pop("tier"), "item", ROWS, DIM, RowwiseAdam(), **options, dtype=torch.float64
        )
        self._dice = torch.Generator().manual_seed(seed)
        keys = torch.arange(ROWS)
        placement = options.get("placement")
        self._keys = keys if placement is None else keys[placement.owner_of(keys) == 1]

    def step(self, rows=40):
        order = torch.randperm(len(self._keys), generator=self._dice)[:rows]
        keys = self._keys[order].sort().values
        grads = torch.randn(len(keys), DIM, generator=self._dice, dtype=torch.float64)
        self.table.apply(keys, grads, 0.1)
        return keys

    def held(self, keys=None):
        """Every touched row and its state, or those of some keys."""
        found = {}  # each was updated, so each counts
        for part, rows in self.table.touched():
            found |= as_rows(part, rows)
        return found if keys is None else {key: found[key] for key in keys if key in found}


def as_rows(keys, rows):
    parts = [rows.weights_UD, *(rows.state[name] for name in sorted(rows.state))]
    return {
        key: [part[i].flatten().tolist() for part in parts] for i, key in enumerate(keys.tolist())
    }


def read(pieces, between=lambda: None):
    found = {}
    for keys, rows in pieces:
        new = as_rows(keys, rows)
        assert not found.keys() & new.keys()  # each row once
        found |= new
        between()
    return found


@pytest.fixture(params=KINDS)
def trained(request, tmp_path):
    made = Trained(request.param, tmp_path)
    for _ in range(8):
        made.step()
    yield made
    made.table.close()


@pytest.mark.parametrize("whole", [False, True])
def test_rows_are_those_of_the_moment_whatever_happens_while_they_are_read(trained, whole):
    if not whole:
        trained.table.mark_saved()
        changed = {key for _ in range(2) for key in trained.step().tolist()}
    expected = trained.held(None if whole else changed)
    snapshot = trained.table.snapshot(whole=whole, most_bytes=MANY)
    assert snapshot.count == len(expected)
    found = read(snapshot.pieces(piece_bytes=1000), between=trained.step)
    assert found == expected
    assert trained.held() != expected and snapshot.closed


def test_two_snapshots_at_once_hold_a_moment_each(trained):
    expected = trained.held()
    first = trained.table.snapshot(whole=True, most_bytes=MANY)
    pieces = first.pieces(piece_bytes=1000)
    found = dict(as_rows(*next(pieces)))
    trained.step()
    later = trained.held()
    second = trained.table.snapshot(whole=True, most_bytes=MANY)
    trained.step()
    assert found | read(pieces, between=trained.step) == expected
    assert read(second.pieces(piece_bytes=1000), between=trained.step) == later


def test_rows_updated_by_another_thread_while_they_are_copied_are_those_of_the_moment(tmp_path):
    made = Trained("memory", tmp_path)
    made.step(ROWS)
    table, copy_at = made.table, made.table.copy_at
    expected = made.held()

    def torn(places, keys, buffers):  # a step updates rows in the middle of their copy
        copied = copy_at(places, keys, buffers)
        if buffers is not None:
            made.step(30)
        return copied

    table.copy_at = torn
    assert read(table.snapshot(whole=True, most_bytes=MANY).pieces(2000)) == expected


def test_an_update_waits_while_kept_rows_fill_the_memory(tmp_path):
    made = Trained("memory", tmp_path)
    made.step(ROWS)
    expected = made.held()
    snapshot = made.table.snapshot(whole=True, most_bytes=1)
    made.step(10)  # may be kept; the next one must wait until it is read
    waiting = threading.Thread(target=made.step, args=(10,))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    found = read(snapshot.pieces(piece_bytes=1000))
    waiting.join(10)
    assert not waiting.is_alive() and found == expected


def test_an_update_goes_on_when_nobody_reads_any_more(tmp_path):
    made = Trained("memory", tmp_path)
    made.step(ROWS)
    snapshot = made.table.snapshot(whole=True, most_bytes=1)
    with pytest.raises(RuntimeError, match="table 'item' is being saved"):
        made.table.clear()
    made.step(10)
    waiting = threading.Thread(target=made.step, args=(10,))
    waiting.start()
    snapshot.close()
    waiting.join(10)
    assert not waiting.is_alive()
    made.table.clear()


def test_a_snapshot_of_nothing_is_closed_and_yields_nothing(tmp_path):
    table = make_table("memory", "item", ROWS, DIM, RowwiseAdagrad())
    snapshot = table.snapshot(whole=False, most_bytes=1)
    assert snapshot.closed and list(snapshot.pieces(100)) == []


@pytest.mark.parametrize("places", [[2, 3, 4], [0, 5], []])
def test_buffers_copy_rows_of_every_type(places):
    buffers = RowBuffers()
    for source in (
        torch.arange(24, dtype=torch.bfloat16).view(6, 4),
        torch.arange(6, dtype=torch.int32),
    ):
        copied = buffers.copy(str(source.dtype), source, np.array(places, dtype=np.int64))
        assert torch.equal(copied, source[places]) and copied.dtype == source.dtype


def test_marks_are_not_counted_where_another_thread_clears_them(trained, monkeypatch):
    """numpy counts what is marked, then fills: a mark cleared in between leaves garbage behind."""
    snapshot = trained.table.snapshot(whole=True, most_bytes=MANY)
    find, looked = np.flatnonzero, []

    def find_in_private_memory(values):
        looked.append(np.shares_memory(values, snapshot._marks_N))
        return find(values)

    monkeypatch.setattr(np, "flatnonzero", find_in_private_memory)
    assert read(snapshot.pieces(MANY))
    assert looked and not any(looked)
