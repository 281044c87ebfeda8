"""The disk tier: as the memory tier while it runs, as of its last flush when it is opened, and
plain words for what goes wrong.
"""

import errno
import json
import os
import subprocess
import threading
import time

import numpy as np
import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.tables import disk_files, disk_transfer
from slipstream.tables.disk_records import RecordFormat, SliceNumbering
from slipstream.tables.disk_table import DiskTable, ReadThrottle
from slipstream.tables.embedding_table import Rows
from slipstream.tables.hashed_table import HashedTable
from slipstream.tables.memory_table import MemoryTable
from slipstream.tables.row_optimizers import DenseAdamW, RowwiseAdagrad, RowwiseAdam
from slipstream.tables.slices import Placement, slice_of

ROWS, DIM = 3000, 6


def disk(directory, optimizer=None, cache_bytes=60_000, rows=ROWS, dim=DIM, **options):
    return DiskTable(
        "item",
        rows,
        dim,
        optimizer or RowwiseAdam(),
        directory,
        cache_bytes=cache_bytes,
        seed=1,
        **options,
    )


def memory(optimizer=None, **options):
    return MemoryTable("item", ROWS, DIM, optimizer or RowwiseAdam(), seed=1, **options)


def train(*tables, steps=6, seed=0, width=300):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        keys = (torch.rand(width, generator=generator) ** 2 * ROWS).long().unique()
        grads = torch.randn(len(keys), DIM, generator=generator)
        for table in tables:
            table.gather(keys)
            table.apply(keys, grads, 0.1)


def same(one, other, keys=None):
    keys = torch.arange(ROWS) if keys is None else keys
    mine, twins = one.read(keys), other.read(keys)
    assert torch.equal(mine.weights_UD, twins.weights_UD)
    assert mine.state.keys() == twins.state.keys()
    assert all(torch.equal(mine.state[name], twins.state[name]) for name in mine.state)


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
    same(table, twin)
    assert (
        table.counters["written"] > 500
        and table.counters["reads"] > 500
        and len(table._cache) <= table._cache.capacity
    )
    table.flush()
    train(table, twin, seed=1)
    same(table, twin)
    assert torch.equal(table.all_rows(), twin.all_rows())
    keys = torch.tensor([5, 2, 5, 2999, 0])
    assert torch.equal(table.gather(keys), twin.gather(keys))
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
    same(table, twin)
    table.close()


def test_a_table_opens_as_it_was_flushed(tmp_path):
    table, flushed, later = disk(tmp_path), memory(), memory()
    train(table, flushed, later)
    table.flush()
    train(table, later, seed=2)
    table.close()  # without a flush: what came after is lost, whether it had left the cache or not
    again = disk(tmp_path)
    same(again, flushed)
    train(again, flushed, seed=2)
    same(again, later)
    again.flush()
    again.close()
    same(disk(tmp_path), later)


def test_a_new_table_that_was_never_flushed_opens_new(tmp_path):
    table = disk(tmp_path)
    train(table)
    assert any(path.suffix == ".rows" for path in tmp_path.iterdir())
    table.close()
    same(disk(tmp_path), memory())
    assert not any(path.suffix == ".rows" for path in tmp_path.iterdir())


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
    same(copy, twin)
    saved = table.state_dict()
    train(table, seed=3)
    table.load_state_dict(saved)
    same(table, twin)
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
    same(table, other)
    train(table, seed=4)
    table.close()
    again = disk(tmp_path)
    same(again, flushed)
    again.load_state_dict(saved)
    again.flush()
    again.close()
    same(disk(tmp_path), other)


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
        same(part, twin, own)
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


@pytest.mark.parametrize("rows", [1, 5, 100_000])
def test_numbers_follow_slice_and_key(rows, monkeypatch):
    monkeypatch.setattr("slipstream.tables.disk_records._FILE_BYTES", 1 << 20)
    numbers = SliceNumbering(rows, 100, Placement(1), 0)
    keys = torch.arange(rows)
    order = np.lexsort((keys.numpy(), slice_of(keys).numpy()))
    assert np.array_equal(numbers.numbers_of(torch.from_numpy(order)), np.arange(rows))
    assert torch.equal(numbers.keys_of(rows // 3, rows), torch.from_numpy(order[rows // 3 :]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_records_keep_every_bit(dtype):
    layout = RecordFormat(RowwiseAdam(), 5, dtype)
    rows = Rows(
        torch.randn(9, 5).to(dtype),
        {"m": torch.randn(9, 5).to(dtype), "v": torch.rand(9).to(dtype), "steps": torch.arange(9)},
    )
    back = layout.unpack(layout.pack(rows))
    assert torch.equal(back.weights_UD, rows.weights_UD) and back.weights_UD.dtype == dtype
    assert all(torch.equal(back.state[name], rows.state[name]) for name in rows.state)
    assert layout.bytes % 8 == 0


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
    same(table, reference)
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


def test_paced_reads_wait_as_long_as_said_without_working(tmp_path):
    table = disk(tmp_path)
    rows = memory().read(torch.arange(ROWS))
    table.write(torch.arange(ROWS), rows)
    table.flush()
    table.close()
    paced = disk(tmp_path, read_rate=2000.0)
    begin, work = time.monotonic(), time.process_time()
    for start in range(0, 600, 200):
        paced.read(torch.arange(start, start + 200))
    assert time.monotonic() - begin >= 0.3
    assert time.process_time() - work < 0.25
    with pytest.raises(ValueError, match="read_rate"):
        ReadThrottle(0)
    paced.close()


# -- what goes wrong --


def test_keys_and_rules_that_do_not_belong(tmp_path):
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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"dim": 7},
            "has dim 6, but 7 is asked for; use the recipe it was trained with, or another "
            "directory",
        ),
        (
            {"optimizer": RowwiseAdagrad()},
            "has optimizer rowwise_adam, but rowwise_adagrad is asked for",
        ),
        ({"rows": 10}, "has num_rows 3000, but 10"),
        ({"dtype": torch.float64}, "has dtype float32, but float64"),
        ({"numbered": True}, "has layout slices, but numbered"),
    ],
)
def test_another_kind_of_table_is_refused_and_the_old_one_stays(tmp_path, change, words):
    table, twin = disk(tmp_path), memory()
    train(table, twin)
    table.flush()
    table.close()
    with pytest.raises(SlipstreamError, match=words):
        disk(tmp_path, **change)
    same(disk(tmp_path), twin)


def test_one_writer_at_a_time(tmp_path):
    table = disk(tmp_path)
    with pytest.raises(
        SlipstreamError,
        match="already open for writing; wait until that job has ended or use another directory",
    ):
        disk(tmp_path)
    table.close()
    disk(tmp_path).close()


def damaged_table(directory):
    table = disk(directory)
    train(table)
    table.flush()
    table.close()
    return next(directory.glob("*.rows")), next(directory.glob("map-*"))


def test_missing_and_cut_files_are_named(tmp_path):
    rows, _ = damaged_table(tmp_path)
    whole = rows.read_bytes()
    rows.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SlipstreamError, match=f"{rows.name} is cut short .* restore it"):
        disk(tmp_path)
    rows.unlink()
    with pytest.raises(SlipstreamError, match=f"{rows.name} is missing"):
        disk(tmp_path)
    rows.write_bytes(whole)
    table = disk(tmp_path)  # whole again, opens again
    os.truncate(rows, 100)  # and is cut while open
    with pytest.raises(SlipstreamError, match="cut short"):
        table.all_rows()
    table.close()


def test_a_damaged_map_or_manifest_is_named(tmp_path):
    _, chart = damaged_table(tmp_path)
    content = chart.read_bytes()
    chart.write_bytes(b"\xff" + content[1:])
    with pytest.raises(SlipstreamError, match=f"{chart.name} is damaged"):
        disk(tmp_path)
    chart.unlink()
    with pytest.raises(SlipstreamError, match=f"{chart.name} is missing"):
        disk(tmp_path)
    (tmp_path / disk_files.MANIFEST).write_text(json.dumps({"format": 99}))
    with pytest.raises(SlipstreamError, match="format 1"):
        disk(tmp_path)
    (tmp_path / disk_files.MANIFEST).write_text("{")
    with pytest.raises(SlipstreamError, match="not readable JSON"):
        disk(tmp_path)


@pytest.mark.parametrize("moment", ["rows", "map", "manifest"])
def test_a_disk_that_fills_up_while_flushing_keeps_the_last_flush(tmp_path, monkeypatch, moment):
    table, flushed, live = disk(tmp_path), memory(), memory()
    train(table, flushed, live)
    table.flush()
    train(table, live, seed=5, steps=1)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail(*args, **kwargs):
        raise full

    with monkeypatch.context() as patch:
        target = {"rows": "transfer_records", "map": "atomic_file", "manifest": "write_json"}[moment]
        patch.setattr(disk_files, target, fail)
        with pytest.raises(
            SlipstreamError, match=r"could not flush table 'item' to .*: No space left on device"
        ):
            table.flush()
    same(table, live)
    train(table, live, seed=6)  # with room again it goes on as if nothing had happened
    same(table, live)
    table.close()
    reopened = disk(tmp_path)
    same(reopened, flushed)
    reopened.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_really_full_disk(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(small)],
        capture_output=True,
        timeout=10,
    )
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        table, flushed = disk(small, cache_bytes=1 << 20), memory()
        train(table, flushed, steps=1, width=400)
        table.flush()
        with pytest.raises(
            SlipstreamError, match=r"No space left on device; on disk it is as after its last flush"
        ):
            for step in range(20):
                train(table, steps=1, seed=step, width=1500)
                table.flush()
        table.close()
        opened = disk(small)
        assert opened._files.generation >= 1
        if opened._files.generation == 1:
            same(opened, flushed)
        opened.close()
    finally:
        subprocess.run(["umount", str(small)], check=True, timeout=10)
