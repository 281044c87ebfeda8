"""Record files: what is refused or damaged is named, and the last commit survives a full disk."""

import errno
import json
import os
import subprocess

import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.tables import disk_files
from slipstream.tables.row_optimizers import RowwiseAdagrad
from tests.support.table_samples import DIM, ROWS, assert_same_rows, disk, memory, train


def test_a_table_opens_as_it_was_flushed(tmp_path):
    table, flushed, later = disk(tmp_path), memory(), memory()
    train(table, flushed, later)
    table.flush()
    train(table, later, seed=2)
    table.close()  # without a flush: what came after is lost, whether it had left the cache or not
    again = disk(tmp_path)
    assert_same_rows(again, flushed)
    train(again, flushed, seed=2)
    assert_same_rows(again, later)
    again.flush()
    again.close()
    assert_same_rows(disk(tmp_path), later)


def test_a_new_table_that_was_never_flushed_opens_new(tmp_path):
    table = disk(tmp_path)
    train(table)
    assert any(path.suffix == ".rows" for path in tmp_path.iterdir())
    table.close()
    assert_same_rows(disk(tmp_path), memory())
    assert not any(path.suffix == ".rows" for path in tmp_path.iterdir())


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
    assert_same_rows(disk(tmp_path), twin)


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
        target = {"rows": "transfer_records", "map": "atomic_file", "manifest": "write_json"}[
            moment
        ]
        patch.setattr(disk_files, target, fail)
        with pytest.raises(
            SlipstreamError, match=r"could not flush table 'item' to .*: No space left on device"
        ):
            table.flush()
    assert_same_rows(table, live)
    train(table, live, seed=6)  # with room again it goes on as if nothing had happened
    assert_same_rows(table, live)
    table.close()
    reopened = disk(tmp_path)
    assert_same_rows(reopened, flushed)
    reopened.close()


@pytest.mark.system
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_really_full_disk(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(small)],
        capture_output=True,
        timeout=120,
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
            assert_same_rows(opened, flushed)
        opened.close()
    finally:
        subprocess.run(["umount", str(small)], check=True, timeout=120)


def test_a_manifest_that_names_the_optimizer_rule_still_opens(tmp_path):
    table, twin = disk(tmp_path), memory()
    train(table, twin)
    table.flush()
    table.close()
    path = tmp_path / disk_files.MANIFEST
    manifest = json.loads(path.read_text())
    # What tables wrote before `rule` was renamed to `optimizer`, in that order.
    manifest["table"] = {
        "name": "item",
        "dim": DIM,
        "dtype": "float32",
        "rule": "rowwise_adam",
        "seed": 1,
        "init_scale": 0.035,
        "layout": "slices",
        "slices": [0, 65536],
        "num_rows": ROWS,
    }
    path.write_text(json.dumps(manifest, indent=2) + "\n")
    with pytest.raises(SlipstreamError, match="has optimizer rowwise_adam, but rowwise_adagrad"):
        disk(tmp_path, RowwiseAdagrad())
    again = disk(tmp_path)
    assert_same_rows(again, twin)
    train(again, twin, seed=1)
    again.flush()
    again.close()
    assert json.loads(path.read_text())["table"]["optimizer"] == "rowwise_adam"
    assert_same_rows(disk(tmp_path), twin)
