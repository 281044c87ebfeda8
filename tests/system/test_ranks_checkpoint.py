"""Checkpoints move between numbers of ranks: what is loaded is what was saved, and the next step is
the same.
"""

import json
import os
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from slipstream.data.store import SequenceStore
from slipstream.errors import SlipstreamError
from slipstream.training.checkpoint import latest, load_checkpoint, load_weights
from slipstream.training.checkpoint_writer import CheckpointWriter
from slipstream.training.plain_metadata import METADATA
from slipstream.training.ranks import ALONE, arrange
from slipstream.training.recommender import Recommender
from tests.support.format_one import save_format_one
from tests.support.ranks_fixtures import run_ranks
from tests.support.training_fixtures import small_recipe, small_store
from tests.system.test_ranks import KINDS, Session

KIND = "retrieval adam"


def stand(session) -> dict[str, torch.Tensor]:
    """Everything this rank holds, and the keys of its rows."""
    found = session.tensors()
    for name, table in session.recommender.tables.tables.items():
        found[f"keys/{name}"] = session.owned(name, table.num_rows)
    return found


def new_session(store, mesh, kind=KIND):
    ranks = arrange(mesh, timedelta(seconds=60)) if dist.is_initialized() else ALONE
    return Session(
        SequenceStore.open(Path(store)), small_recipe(**KINDS[kind]), torch.float64, ranks
    )


def save_now(directory, step, session, state=None):
    """Save every row, and wait until it is on the disk."""
    writer = CheckpointWriter(directory, session.recommender, session.ranks)
    try:
        writer.save(step, session.optimizer, state or {})
        writer.wait()
    finally:
        writer.close()


def save_here(rank, world, scratch, mesh, kind=KIND):
    """Six steps, a checkpoint, one more step; every rank leaves behind what it held before and
    after.
    """
    session = new_session(f"{scratch}/store", mesh, kind).train(6)
    state = {"sampler": session.sampler.state_dict(), "progress": {"step": 6}}
    save_now(Path(scratch) / "checkpoints", 6, session, state)
    torch.save(stand(session), f"{scratch}/before-{rank}.pt")
    torch.save(stand(session.train(1)), f"{scratch}/after-{rank}.pt")


def save_earlier(rank, world, scratch, mesh):
    """The same six steps, saved as many ranks did before row files."""
    session = new_session(f"{scratch}/store", mesh).train(6)
    state = {"sampler": session.sampler.state_dict(), "progress": {"step": 6}}
    place, parts = Path(scratch) / "checkpoints", (session.recommender, session.optimizer)
    save_format_one(place, 6, *parts, state, session.ranks)
    torch.save(stand(session), f"{scratch}/before-{rank}.pt")
    torch.save(stand(session.train(1)), f"{scratch}/after-{rank}.pt")


def together(scratch, when) -> dict[str, torch.Tensor]:
    """The ranks' parts as whole tables."""
    whole: dict[str, torch.Tensor] = {}
    for path in sorted(Path(scratch).glob(f"{when}-*.pt")):
        part = torch.load(path, weights_only=True)
        for name, value in part.items():
            if name.startswith("tables/"):
                keys = part[f"keys/{name.split('/')[1]}"]
                rows = whole.setdefault(
                    name, torch.full((1000, *value.shape[1:]), torch.nan, dtype=value.dtype)
                )
                rows[keys] = value
            elif not name.startswith("keys/"):
                whole[name] = value
    return whole


def load_here(rank, world, scratch, mesh, kind=KIND):
    """Load on this mesh: bitwise what was saved, and one step later what those who saved it had (to
    rounding).
    """
    session = new_session(f"{scratch}/store", mesh, kind)
    state = load_checkpoint(
        latest(Path(scratch) / "checkpoints"), session.recommender, session.optimizer, session.ranks
    )
    session.sampler.load_state_dict(state["sampler"])
    session.step, worst = state["progress"]["step"], 0.0
    for when in ("before", "after"):
        mine, wanted = stand(session), together(scratch, when)
        for name, value in mine.items():
            if name.startswith("keys/"):
                continue
            other = (
                wanted[name][mine[f"keys/{name.split('/')[1]}"]]
                if name.startswith("tables/")
                else wanted[name]
            )
            if when == "before":
                assert torch.equal(value, other), f"{name} is not what was saved"
            else:
                worst = max(worst, float((value - other).abs().max()) if value.numel() else 0.0)
        session.train(1 if when == "before" else 0)
    return worst


@pytest.fixture
def scratch(tmp_path):
    small_store(tmp_path / "store")
    return tmp_path


FORMATS = ("now", "format one")


def save_both(rank, world, scratch):
    """The same steps saved by today's writer and as many ranks did before row files."""
    save_here(rank, world, f"{scratch}/now", "2x2")
    save_earlier(rank, world, f"{scratch}/format one", "2x2")


def load_both(rank, world, scratch):
    return max(load_here(rank, world, f"{scratch}/{name}", "auto") for name in FORMATS)


@pytest.mark.slow
def test_saved_by_four_loaded_by_others(tmp_path):
    for name in FORMATS:
        small_store(tmp_path / name / "store")
    run_ranks(4, f"{__name__}:save_both", tmp_path / "save", scratch=str(tmp_path))
    for name in FORMATS:  # torch's pickled metadata is never written
        assert not (latest(tmp_path / name / "checkpoints") / ".metadata").exists()
    assert load_both(0, 1, str(tmp_path)) < 1e-12
    for others in (2, 3):
        place = tmp_path / f"load-{others}"
        answers = run_ranks(others, f"{__name__}:load_both", place, scratch=str(tmp_path))
        assert max(answers) < 1e-12


BACK_AND_FORTH = (KIND, "whole catalogue, every row moves")


def load_then_save(rank, world, scratch):
    """What one rank saved, loaded by these; what these save, left for one rank to load."""
    worst = [
        load_here(rank, world, f"{scratch}/one {kind}", "auto", kind) for kind in BACK_AND_FORTH
    ]
    for kind in BACK_AND_FORTH:
        save_here(rank, world, f"{scratch}/many {kind}", "auto", kind)
    return max(worst)


def test_saved_by_one_loaded_by_many_and_back(tmp_path):
    for kind in BACK_AND_FORTH:
        for who in ("one", "many"):
            small_store(tmp_path / f"{who} {kind}" / "store")
        save_here(0, 1, str(tmp_path / f"one {kind}"), "auto", kind)
    assert (
        max(run_ranks(2, f"{__name__}:load_then_save", tmp_path / "ranks", scratch=str(tmp_path)))
        < 1e-12
    )
    for kind in BACK_AND_FORTH:
        assert load_here(0, 1, str(tmp_path / f"many {kind}"), "auto", kind) < 1e-12


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    scratch = tmp_path_factory.mktemp("saved")
    small_store(scratch / "store")
    run_ranks(2, f"{__name__}:save_earlier", scratch / "save", scratch=str(scratch), mesh="auto")
    return scratch


def spoil_files(path, target):
    for file in path.glob("*.distcp"):
        target(file)


def change_metadata(path, change):
    content = json.loads((path / METADATA).read_text())
    change(content["tensors"])
    (path / METADATA).write_text(json.dumps(content))


BAD = {
    "a shard is missing": (
        lambda path: spoil_files(path, Path.unlink),
        "not a readable checkpoint",
    ),
    "a shard is truncated": (
        lambda path: spoil_files(path, lambda f: f.write_bytes(f.read_bytes()[:500])),
        "not a readable checkpoint",
    ),
    "metadata is a pickle": (
        lambda path: (path / METADATA).write_bytes(b"\x80\x04K\x01."),
        "is not readable JSON",
    ),
    "a file outside": (
        lambda path: change_metadata(
            path, lambda t: t["tables/item/keys"]["chunks"][0].update(file="../../secret")
        ),
        "is not the metadata of a checkpoint",
    ),
    "a type nobody has": (
        lambda path: change_metadata(path, lambda t: t["tables/item/keys"].update(dtype="object")),
        "is not the metadata of a checkpoint",
    ),
    "no such table": (
        lambda path: change_metadata(
            path, lambda t: [t.pop(n) for n in list(t) if n.startswith("tables/item/")]
        ),
        "has no table 'item'",
    ),
    "another width": (
        lambda path: change_metadata(path, lambda t: t["tables/item/weights"].update(size=[15, 9])),
        "saved rows of table 'item' do not fit",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_damaged_checkpoints_of_format_one_are_refused(saved, tmp_path, what):
    spoil, sentence = BAD[what]
    path = tmp_path / "step-00000006"
    shutil.copytree(latest(saved / "checkpoints"), path)
    recommender = Recommender.build(
        small_recipe(**KINDS[KIND]), SequenceStore.open(saved / "store"), torch.float64
    )
    load_weights(path, recommender)
    spoil(path)
    with pytest.raises(SlipstreamError, match=sentence):
        load_weights(
            path,
            Recommender.build(
                small_recipe(**KINDS[KIND]), SequenceStore.open(saved / "store"), torch.float64
            ),
        )


def fail_on_one_rank(rank, world, scratch):
    """Rank 1's disk is full: everybody gets the error; the old checkpoint stays newest."""
    session = new_session(f"{scratch}/store", "auto").train(2)
    checkpoints = Path(scratch) / "full"
    save_now(checkpoints, 2, session)
    if rank == 1:
        session.recommender.tables["item"].copy_at = refuse
    try:
        save_now(checkpoints, 3, session)
    except SlipstreamError as error:
        dist.barrier()  # rank 0 sweeps up after all have failed
        return [
            str(error),
            latest(checkpoints).name,
            [path.name for path in checkpoints.glob(".*")],
        ]
    return ["no error"]


def refuse(*given):
    raise OSError(28, "No space left on device")


def test_a_rank_that_cannot_write_makes_all_ranks_say_so(saved):
    for rank, answer in enumerate(
        run_ranks(2, f"{__name__}:fail_on_one_rank", saved / "fail", scratch=str(saved))
    ):
        assert "No space left" in answer[0] and answer[1:] == ["step-00000002", []], (rank, answer)


def through_tiers(rank, world, scratch):
    """Rows saved from files or a hash index by these ranks are the rows another tier then holds,
    past included.
    """
    store = SequenceStore.open(Path(scratch) / "store")
    ranks, found = arrange("auto", timedelta(seconds=60)), []
    for tier, other in (("disk", "memory"), ("hashed", "hashed")):
        recipe = small_recipe(
            tables={"tier": tier, **({"directory": f"{scratch}/rows"} if tier == "disk" else {})}
        )
        mine = Session(store, recipe, torch.float64, ranks).train(5)
        checkpoints = Path(scratch) / f"from-{tier}"
        save_now(checkpoints, 5, mine)
        theirs = Session(store, small_recipe(tables={"tier": other}), torch.float64, ranks)
        load_checkpoint(latest(checkpoints), theirs.recommender, theirs.optimizer, ranks)
        left, right = mine.tensors(), theirs.tensors()
        assert left.keys() == right.keys()
        found.append(all(torch.equal(value, right[name]) for name, value in left.items()))
        mine.recommender.tables.close()
        if tier == "hashed":
            pasts = [
                [
                    rows.state["tier.seen"].tolist()
                    for _, rows in s.recommender.tables["item"].touched()
                ]
                for s in (mine, theirs)
            ]
            found.append(pasts[0] == pasts[1])
    return found


def test_rows_move_between_tiers_through_a_checkpoint(saved):
    assert (
        run_ranks(2, f"{__name__}:through_tiers", saved / "tiers", scratch=str(saved))
        == [[True] * 3] * 2
    )


ADMITTING = {"tier": "hashed", "admit_after": 2, "max_rows": 160}


def save_admission(rank, world, scratch):
    """Two ranks train a table that admits late and evicts, and save; returns what each holds."""
    ranks = arrange("auto", timedelta(seconds=60))
    store = SequenceStore.open(Path(scratch) / "large")
    session = Session(store, small_recipe(tables=ADMITTING), torch.float64, ranks).train(6)
    table, flushed, fsync = session.recommender.tables["item"], [], os.fsync
    os.fsync = lambda descriptor: (flushed.append(descriptor), fsync(descriptor))[1]
    try:
        checkpoints = Path(scratch) / "admission"
        save_now(checkpoints, 6, session)
    finally:
        os.fsync = fsync
    return [held(table), table.max_rows, len(flushed)]


def held(table) -> dict[str, list[int]]:
    """Ids with a row and the step that last trained each, ids that wait and their sightings."""
    rows = [(keys_U, rows.state["tier.seen"]) for keys_U, rows in table.touched()]
    waiting = table.admission()
    return {
        "ids": torch.cat([keys for keys, _ in rows]).tolist(),
        "seen": torch.cat([seen for _, seen in rows]).tolist(),
        "waiting": waiting["candidates"].tolist(),
        "sightings": waiting["candidate_sightings"].tolist(),
        "clock": [int(waiting["clock"])],
    }


def test_ids_that_wait_for_a_row_and_every_row_come_back_on_fewer_ranks(scratch):
    small_store(scratch / "large", users=40, items=300)
    found = run_ranks(2, f"{__name__}:save_admission", scratch / "ranks", scratch=str(scratch))
    assert [limit for _, limit, _ in found] == [80, 80]  # of 160
    assert all(flushed >= 2 for _, _, flushed in found)  # each rank flushes its own files
    alone = Session(
        SequenceStore.open(scratch / "large"), small_recipe(tables=ADMITTING), torch.float64, ALONE
    )
    load_checkpoint(latest(scratch / "admission"), alone.recommender, alone.optimizer)
    mine = held(alone.recommender.tables["item"])
    for ids, about in (("ids", "seen"), ("waiting", "sightings")):
        saved = {k: v for part, *_ in found for k, v in zip(part[ids], part[about], strict=True)}
        assert len(saved) > 5
        assert saved == dict(zip(mine[ids], mine[about], strict=True))
    assert mine["clock"] == found[0][0]["clock"]
