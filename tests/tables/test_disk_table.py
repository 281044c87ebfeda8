"""A disk table equals a memory table, whatever its cache holds and whoever reads."""

import threading
from types import SimpleNamespace

import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.tables import disk_table, disk_transfer
from slipstream.tables.disk_table import DiskTable, ReadThrottle
from slipstream.tables.embedding_table import Rows
from slipstream.tables.hashed_table import HashedTable
from slipstream.tables.memory_table import MemoryTable
from slipstream.tables.row_optimizers import DenseAdamW, RowwiseAdagrad, RowwiseAdam
from slipstream.tables.slices import Placement, slice_of
from tests.support.table_samples import DIM, ROWS, assert_same_rows, disk, memory, train


@pytest.mark.parametrize(
    "optimizer", [RowwiseAdagrad(), RowwiseAdam()], ids=lambda optimizer: optimizer.name
)
@pytest.mark.parametrize("kernels", ["native", "plain"])
def test_a_small_cache_changes_nothing(tmp_path, optimizer, kernels, monkeypatch):
    if kernels == "plain":
        monkeypatch.setattr(disk_transfer.native, "available", lambda: False)
    table, twin = disk(tmp_path, optimizer), memory(optimizer)
    assert table._cache.capacity < ROWS // 4
    train(table, twin)
    assert_same_rows(table, twin)
    assert (
        table.counters["written"] > 500
        and table.counters["reads"] > 500
        and len(table._cache) <= table._cache.capacity
    )
    table.flush()
    train(table, twin, seed=1)
    assert_same_rows(table, twin)
    assert torch.equal(table.all_rows(), twin.all_rows())
    keys = torch.tensor([5, 2, 5, 2999, 0])
    assert torch.equal(table.gather(keys), twin.gather(keys))
    table.close()


def test_reading_past_the_cache_leaves_it_as_it_was(tmp_path):
    table, twin = disk(tmp_path), memory()
    train(table, twin)
    before = table._cache.numbers(torch.arange(len(table._cache)))
    clock, used = table._cache.clock, table._cache._used_C.clone()
    assert torch.equal(table.peek(torch.arange(ROWS)), twin.peek(torch.arange(ROWS)))
    assert (table._cache.numbers(torch.arange(len(table._cache))) == before).all()
    assert table._cache.clock == clock and torch.equal(table._cache._used_C, used)
    table.close()


def test_batches_larger_than_the_cache_are_served(tmp_path):
    table, twin = disk(tmp_path, cache_bytes=5_000), memory()
    assert table._cache.capacity < 100
    train(table, twin, steps=3, width=2000)
    rows = Rows(
        torch.randn(ROWS, DIM),
        {name: value + 1 for name, value in twin.read(torch.arange(ROWS)).state.items()},
    )
    for each in (table, twin):
        each.write(torch.arange(ROWS), rows)
    assert_same_rows(table, twin)
    table.close()


def test_touched_rows_come_by_slice_and_rebuild_the_table(tmp_path):
    table, twin = disk(tmp_path), memory()
    train(table, twin)
    chunks = list(table.touched(chunk=100))
    keys = torch.cat([keys for keys, _ in chunks])
    pairs = list(zip(slice_of(keys).tolist(), keys.tolist(), strict=True))
    assert pairs == sorted(pairs) and max(len(part) for part, _ in chunks) == 100
    steps = twin.read(torch.arange(ROWS)).state["steps"]
    assert sorted(keys.tolist()) == steps.nonzero().squeeze(1).tolist()
    copy = memory()
    for part, rows in chunks:
        copy.write(part, rows)
    assert_same_rows(copy, twin)
    saved = table.state_dict()
    train(table, seed=3)
    table.load_state_dict(saved)
    assert_same_rows(table, twin)
    table.close()


def test_loading_other_rows_keeps_the_last_flush_until_the_next(tmp_path):
    table, flushed = disk(tmp_path), memory()
    train(table, flushed)
    table.flush()
    other = memory()
    train(other, seed=9)
    saved = {
        "keys": torch.arange(ROWS),
        "weights": other.weights_ND,
        **{f"state.{k}": v for k, v in other.state.items()},
    }
    table.load_state_dict(saved)
    assert_same_rows(table, other)
    train(table, seed=4)
    table.close()
    again = disk(tmp_path)
    assert_same_rows(again, flushed)
    again.load_state_dict(saved)
    again.flush()
    again.close()
    assert_same_rows(disk(tmp_path), other)


def test_ranks_hold_their_parts_in_files_of_slice_ranges(tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.tables.disk_records._FILE_BYTES", 20_000)
    placement, twin = Placement(3), memory()
    train(twin)
    rows = twin.read(torch.arange(ROWS))
    owners = placement.owner_of(torch.arange(ROWS))
    for rank in range(3):
        part = disk(tmp_path / str(rank), placement=placement, rank=rank)
        own = (owners == rank).nonzero().squeeze(1)
        part.write(
            own,
            Rows(rows.weights_UD[own], {name: value[own] for name, value in rows.state.items()}),
        )
        part.flush()
        assert_same_rows(part, twin, own)
        assert torch.equal(torch.cat([keys for keys, _ in part.touched()]).sort().values, own)
        names = sorted(path.name for path in (tmp_path / str(rank)).glob("*.rows"))
        low, high = placement.slices(rank)
        assert (
            len(names) > 2
            and names[0].startswith(f"slices-{low:05d}")
            and names[-1].endswith(f"{high - 1:05d}.rows")
        )
        with pytest.raises(IndexError, match="does not own"):
            part.gather((owners != rank).nonzero()[0])
        with pytest.raises(ValueError, match="ask all ranks"):
            part.all_rows()
        part.close()
    with pytest.raises(
        SlipstreamError, match=r"slices \[0, 21845\], but \[21845, 43690\] is asked for"
    ):
        disk(tmp_path / "0", placement=placement, rank=1)


def test_hashed_over_disk_opens_with_its_index(tmp_path):
    def over_disk():
        storage = DiskTable(
            "item", 16, DIM, RowwiseAdam(), tmp_path, cache_bytes=30_000, seed=1, numbered=True
        )
        return HashedTable(storage, admit_after=2, max_rows=1500)

    table = over_disk()
    twin = HashedTable(
        MemoryTable("item", 16, DIM, RowwiseAdam(), seed=1), admit_after=2, max_rows=1500
    )
    train(table, twin, steps=20, width=900)
    table.flush()
    everything = torch.arange(ROWS)
    saved = twin.read(everything)
    train(table, seed=7)
    table.close()
    again = over_disk()
    assert len(again) == len(twin) > 100
    got = again.read(everything)
    assert torch.equal(got.weights_UD, saved.weights_UD) and torch.equal(
        got.state["m"], saved.state["m"]
    )
    train(again, twin, steps=8, seed=8, width=900)  # goes on admitting and evicting the same ids
    assert torch.equal(again._index.items()[0], twin._index.items()[0])
    assert torch.equal(again.gather(everything), twin.gather(everything))
    again.close()


def test_reading_in_one_thread_while_another_trains(tmp_path):
    table, twin = disk(tmp_path), memory()
    stop, failures = threading.Event(), []

    def reader():
        generator = torch.Generator().manual_seed(11)
        untouched = torch.arange(2000, ROWS)
        while not stop.is_set():
            keys = untouched[torch.randint(len(untouched), (50,), generator=generator)].unique()
            for got in (table.gather(keys), table.read(keys).weights_UD):
                if not torch.equal(got, twin.gather(keys)):
                    failures.append(keys)

    threads = [threading.Thread(target=reader) for _ in range(2)]
    for thread in threads:
        thread.start()
    reference = memory()
    for step in range(60):
        generator = torch.Generator().manual_seed(step)
        keys = torch.randint(2000, (200,), generator=generator).unique()
        grads = torch.randn(len(keys), DIM, generator=generator)
        table.gather(keys)
        for each in (table, reference):
            each.apply(keys, grads, 0.1)
        if step % 20 == 0:
            table.flush()
    stop.set()
    for thread in threads:
        thread.join(timeout=30)
    assert not failures
    assert_same_rows(table, reference)
    table.close()


def test_a_row_read_before_another_thread_wrote_it_does_not_enter_the_cache(tmp_path, monkeypatch):
    table, key = disk(tmp_path), torch.tensor([7])
    rows, load = memory().read(torch.arange(ROWS)), table._load

    def written_meanwhile(keys, numbers):
        old = load(keys, numbers)
        monkeypatch.undo()
        table.write(
            key,
            Rows(
                torch.full((1, DIM), 5.0), {name: value[:1] for name, value in rows.state.items()}
            ),
        )
        table.write(
            torch.arange(100, ROWS),
            Rows(rows.weights_UD[100:], {name: value[100:] for name, value in rows.state.items()}),
        )
        assert (
            int(table._cache.find(torch.from_numpy(table._numbering.numbers_of(key)))) < 0
        )  # it has left for the files
        return old

    monkeypatch.setattr(table, "_load", written_meanwhile)
    table.gather(key)
    assert (table.gather(key) == 5).all()
    table.close()


def test_a_read_rate_makes_reads_wait_and_only_reads(tmp_path, monkeypatch):
    now, table = [100.0], disk(tmp_path)
    clock = SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds)
    )
    monkeypatch.setattr(disk_table, "time", clock)
    table.write(torch.arange(ROWS), memory().read(torch.arange(ROWS)))
    table.flush()
    table.close()
    throttled = disk(tmp_path, read_rate=2000.0)
    for start in range(0, 600, 200):
        throttled.read(torch.arange(start, start + 200))
    assert now[0] == pytest.approx(100.3)
    with pytest.raises(ValueError, match="read_rate"):
        ReadThrottle(0)
    throttled.close()


def test_keys_and_optimizers_that_do_not_belong_are_refused(tmp_path):
    table = disk(tmp_path)
    for key in (-1, ROWS, 2**62):
        for call in (
            lambda k: table.gather(k),
            lambda k: table.read(k),
            lambda k: table.apply(k, torch.ones(1, DIM), 0.1),
        ):
            with pytest.raises(IndexError, match=f"a key is {key}"):
                call(torch.tensor([key]))
    table.close()
    with pytest.raises(SlipstreamError, match="disk table cannot do; use rowwise_adam"):
        disk(tmp_path / "b", DenseAdamW())
    with pytest.raises(SlipstreamError, match="holds fewer than 16 rows"):
        disk(tmp_path / "c", cache_bytes=100)
