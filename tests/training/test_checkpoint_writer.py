"""Checkpoints written behind the steps, from the rows that changed, equal whole ones."""

import os
import threading
import time

import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.training import checkpoint, checkpoint_writer, row_files
from slipstream.training.checkpoint_writer import CheckpointClock, CheckpointWriter
from slipstream.training.optimizers import make_adamw
from slipstream.training.ranks import ALONE
from slipstream.training.recommender import Recommender
from slipstream.training.run import open_run, train
from tests.support.training_fixtures import small_recipe, small_store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("data") / "store", users=40, items=300)


@pytest.fixture
def row_by_row(monkeypatch):
    """No table is small enough to be written whole."""
    monkeypatch.setattr(checkpoint, "WHOLE_BYTES", 0)


TABLES = {
    "memory": {"tier": "memory"},
    "disk": {"tier": "disk", "cache_bytes": 1 << 16},
    "hashed": {"tier": "hashed", "admit_after": 2, "max_rows": 160},
    "hashed on disk": {"tier": "hashed", "admit_after": 2, "max_rows": 160, "cache_bytes": 1 << 16},
}


def recipe_of(kind, place, steps, **train_options):
    tables = dict(TABLES[kind])
    if "disk" in kind:
        tables["directory"] = str(place / "rows")
    options = {"max_steps": steps, "epochs": 50, "checkpoint_every": 2, **train_options}
    return small_recipe(tables=tables, train=options)


def held(run_dir, store):
    """Everything the newest checkpoint of a run holds."""
    path = checkpoint.latest(run_dir / "checkpoints")
    recommender = open_run(run_dir, store, which="last")[2]
    found = checkpoint.read_dense(path, ("model/", "optimizer/", "random/"))
    for name, table in recommender.tables.tables.items():
        parts = list(table.touched())
        found[f"{name}/weights"] = recommender.tables.all_rows(name)
        keys = torch.cat([keys for keys, _ in parts])
        kept, order = keys.sort()
        found[f"{name}/keys"] = kept if table.forgets else torch.empty(0)
        for entry in parts[0][1].state:
            state = torch.cat([rows.state[entry] for _, rows in parts])[order]
            found[f"{name}/{entry}"] = state if table.forgets else state[state != 0]
        if table.forgets:
            waiting = table.admission()
            found |= {f"{name}/{key}": value.sort()[0] for key, value in waiting.items()}
    return found


def assert_same(one, two):
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(value, two[name]), name


@pytest.mark.system  # several whole runs
@pytest.mark.parametrize("kind", TABLES)
def test_a_chain_of_checkpoints_resumes_bit_for_bit(store, tmp_path, monkeypatch, kind):
    once = recipe_of(kind, tmp_path / "once", 9, checkpoint_every=None)
    train(once, store, tmp_path / "once", quiet=True)  # one checkpoint, small tables whole
    expected = held(tmp_path / "once", store)
    monkeypatch.setattr(checkpoint, "WHOLE_BYTES", 0)
    monkeypatch.setattr(row_files, "FILE_BYTES", 1 << 11)
    monkeypatch.setattr(checkpoint_writer, "MOST_CHANGED", 1e9)
    for anew in (False, True):
        monkeypatch.setattr(checkpoint_writer, "MOST_NEWER", 0.0 if anew else 1e9)
        out = tmp_path / f"anew {anew}"
        for steps in (5, 9):
            train(recipe_of(kind, out, steps), store, out, quiet=True)
        newest = checkpoint.latest(out / "checkpoints")
        numbers = {file.number for file in checkpoint.row_files(newest, ["item"])}
        assert len(numbers) > 3 if not anew else len(numbers) == 1
        assert_same(held(out, store), expected)


@pytest.fixture
def writer(store, tmp_path, row_by_row):
    recipe = small_recipe()
    recommender = Recommender.build(recipe, store)
    found = CheckpointWriter(tmp_path, recommender)
    yield found
    found.close()


def touch(writer, keys):
    table = writer.recommender.tables["item"]
    keys = torch.tensor(keys)
    table.apply(keys, torch.ones(len(keys), table.dim), 0.1)
    return table


def test_a_checkpoint_writes_the_rows_updated_since_the_last_and_needs_no_other(
    store, writer, tmp_path
):
    table = touch(writer, [1, 5, 9])
    writer.save(1, None, {}, keep=2)
    writer.wait()
    touch(writer, [5])
    writer.save(2, None, {}, keep=2)
    writer.save(2, None, {}, kind=checkpoint.BEST)
    writer.wait()
    first, second = checkpoint.list_checkpoints(tmp_path)
    (old,) = checkpoint.row_files(first, ["item"])
    new, again = checkpoint.row_files(second, ["item"])
    assert row_files.read_rows(new.path)["keys"].tolist() == [5]
    assert again.path.stat().st_ino == old.path.stat().st_ino  # the same bytes on the disk
    best = checkpoint.latest(tmp_path, checkpoint.BEST)
    assert new.path.stat().st_nlink == 2 and len(list(best.glob("rows-*"))) == 2
    writer.save(3, None, {}, keep=1)
    writer.wait()
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step-00000003"]
    for path in (best, tmp_path / "step-00000003"):
        other = Recommender.build(writer.recommender.recipe, store)
        checkpoint.load_weights(path, other)
        assert torch.equal(other.tables["item"].all_rows(), table.all_rows())


def test_steps_go_on_while_a_checkpoint_is_written(store, writer, tmp_path, monkeypatch):
    gate, write = threading.Event(), checkpoint.write_tensors
    monkeypatch.setattr(checkpoint, "write_tensors", lambda *a: (gate.wait(20), write(*a))[1])
    optimizer = make_adamw(writer.recommender.model, writer.recommender.recipe.optimizer)
    table = touch(writer, [1, 5])
    saved, model = table.all_rows().clone(), writer.recommender.model
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = {"sampler": {"seen": [1]}}
    writer.save(1, optimizer, state)
    touch(writer, [5, 7])
    state["sampler"]["seen"].append(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert checkpoint.latest(tmp_path) is None  # not written yet
    gate.set()
    writer.wait()
    other = Recommender.build(writer.recommender.recipe, store)
    found = checkpoint.load_weights(tmp_path / "step-00000001", other)
    assert found["sampler"] == {"seen": [1]}
    assert torch.equal(other.tables["item"].all_rows(), saved)
    assert all(torch.equal(v, weights[name]) for name, v in other.model.state_dict().items())


def test_an_error_of_the_thread_is_raised_by_the_next_save(writer, tmp_path, monkeypatch):
    def refuse(path, tensors):
        raise OSError(28, "No space left on device")

    touch(writer, [1])
    writer.save(1, None, {})
    writer.wait()
    monkeypatch.setattr(checkpoint, "write_tensors", refuse)
    writer.save(2, None, {})
    with pytest.raises(SlipstreamError, match=r"could not write .*step-00000002: No space"):
        writer.wait()
    with pytest.raises(SlipstreamError, match="could not write"):
        writer.save(3, None, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_steps_wait_where_more_rows_are_kept_than_memory_may_hold(
    store, writer, tmp_path, monkeypatch
):
    gate, write = threading.Event(), checkpoint.write_tensors
    monkeypatch.setattr(checkpoint, "write_tensors", lambda *a: (gate.wait(20), write(*a))[1])
    monkeypatch.setattr(checkpoint_writer, "_most_kept_bytes", lambda on_disk: 1)
    monkeypatch.setattr(row_files, "FILE_BYTES", 1 << 9)
    table = touch(writer, list(range(200)))
    saved = table.all_rows().clone()
    writer.save(1, None, {})
    touch(writer, [1, 2, 3])
    steps = threading.Thread(target=touch, args=(writer, [3, 4, 5]))
    steps.start()
    steps.join(0.2)
    assert steps.is_alive()  # the rows of the first step are still in memory
    gate.set()
    steps.join(20)
    writer.wait()
    assert not steps.is_alive()
    other = Recommender.build(writer.recommender.recipe, store)
    checkpoint.load_weights(tmp_path / "step-00000001", other)
    assert torch.equal(other.tables["item"].all_rows(), saved)


def test_steps_go_on_when_a_checkpoint_cannot_be_written(writer, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "_most_kept_bytes", lambda on_disk: 1)
    gate = threading.Event()

    def refuse(path, tensors):
        gate.wait(20)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", refuse)
    touch(writer, list(range(200)))
    writer.save(1, None, {})
    touch(writer, [1])
    steps = threading.Thread(target=touch, args=(writer, [2]))
    steps.start()
    gate.set()
    steps.join(20)
    assert not steps.is_alive()
    with pytest.raises(SlipstreamError, match="No space left"):
        writer.wait()


def test_a_checkpoint_begins_anew_where_most_rows_changed_or_row_files_became_large():
    chain = checkpoint_writer.Chain()
    assert chain.begins_anew(0)  # the first one holds everything
    chain.add(100, whole=True)
    assert chain.begins_anew(51) and not chain.begins_anew(50)
    for _ in range(2):
        chain.add(50, whole=False)
    assert chain.begins_anew(1) and not chain.begins_anew(0)  # 101 bytes over the first 100
    chain.add(120, whole=True)
    assert chain == checkpoint_writer.Chain(120, 0, 1)
    for _ in range(checkpoint_writer.MOST_NUMBERS - 1):
        assert not chain.begins_anew(1)
        chain.add(1, whole=False)
    assert chain.begins_anew(1)


def test_rows_written_anew_leave_no_older_file_behind(store, writer, tmp_path):
    table = touch(writer, list(range(100)))
    writer.save(1, None, {}, keep=9)
    touch(writer, [1])
    writer.save(2, None, {}, keep=9)
    touch(writer, list(range(30, 90)))  # 60 of 100
    writer.save(3, None, {}, keep=9)
    touch(writer, [2])
    writer.save(4, None, {}, keep=9)
    writer.wait()
    found = [
        sorted({file.number for file in checkpoint.row_files(path, ["item"])})
        for path in checkpoint.list_checkpoints(tmp_path)
    ]
    assert found == [[0], [0, 1], [2], [2, 3]]
    other = Recommender.build(writer.recommender.recipe, store)
    checkpoint.load_weights(tmp_path / "step-00000004", other)
    assert torch.equal(other.tables["item"].all_rows(), table.all_rows())


def test_other_first_rows_and_damaged_row_files_are_refused(store, writer, tmp_path):
    touch(writer, [1, 5])
    writer.save(1, None, {})
    writer.wait()
    path = tmp_path / "step-00000001"
    with pytest.raises(SlipstreamError, match="trained from other first rows"):
        checkpoint.load_weights(path, Recommender.build(small_recipe(seed=7), store))
    smaller = Recommender.build(small_recipe(), small_store(tmp_path / "smaller", items=4))
    with pytest.raises(SlipstreamError, match="saved rows of table 'item' do not fit: this table"):
        checkpoint.load_weights(path, smaller)
    (file,) = checkpoint.row_files(path, ["item"])
    file.path.write_bytes(file.path.read_bytes()[:-3])
    with pytest.raises(SlipstreamError, match="not a readable checkpoint"):
        checkpoint.load_weights(path, Recommender.build(small_recipe(), store))
    os.unlink(file.path)
    with pytest.raises(SlipstreamError, match="is missing"):
        checkpoint.load_weights(path, Recommender.build(small_recipe(), store))


def test_a_checkpoint_is_due_by_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock, due = CheckpointClock(10.0, 0, ALONE), []
    for step in range(1, 31):
        now[0] += 1.0
        if clock.is_due(step):
            due.append(step)
            clock.restart(step)
    assert due == [10, 20, 30]
    assert not CheckpointClock(None, 0).is_due(1)


def test_a_run_saves_by_time_and_numbers_do_not_depend_on_it(store, tmp_path):
    for seconds in (1e-9, None):
        recipe = small_recipe(
            train={"max_steps": 4, "epochs": 9, "checkpoint_seconds": seconds, "keep_last": 9}
        )
        train(recipe, store, tmp_path / str(seconds), quiet=True)
    often, once = (tmp_path / str(seconds) / "checkpoints" for seconds in (1e-9, None))
    assert [len(checkpoint.list_checkpoints(path)) for path in (often, once)] == [4, 1]
    assert_same(held(tmp_path / "1e-09", store), held(tmp_path / "None", store))
