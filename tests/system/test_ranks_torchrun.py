"""`torchrun -m slipstream train`: one run, recorded once; a killed rank is named, and the restarted
job ends where it should.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from slipstream.data.store import SequenceStore
from slipstream.training.checkpoint import latest
from slipstream.training.run import open_run, train
from slipstream.training.telemetry import read_metrics
from tests.support.ranks_fixtures import environment, run_ranks
from tests.support.training_fixtures import saved_tensors, small_recipe, small_store

STEPS = 30
RECIPE = small_recipe(
    optimizer={"clip_norm": 1.0},
    train={
        "epochs": 1000,
        "max_steps": STEPS,
        "evaluate_every": 5,
        "checkpoint_every": 4,
        "log_every": 1,
        "keep_last": 2,
    },
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    directory = tmp_path_factory.mktemp("torchrun")
    small_store(directory / "store")
    (directory / "recipe.yaml").write_text(yaml.safe_dump(RECIPE.model_dump(mode="json")))
    return directory


def start(scratch: Path, out: str, *options: str, ranks: int = 2) -> subprocess.Popen:
    """The command as a user types it, on a free port."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        *options,
    ]
    command = [
        *launcher,
        "-m",
        "slipstream",
        "train",
        str(scratch / "recipe.yaml"),
        f"data={scratch / 'store'}",
    ]
    with (scratch / f"{out}.txt").open("w") as log:
        return subprocess.Popen(
            [*command, "--out", str(scratch / out)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(),
            start_new_session=True,
        )


def finish(job: subprocess.Popen, seconds: float = 150) -> int:
    try:
        return job.wait(timeout=seconds)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def workers(job: subprocess.Popen) -> dict[int, int]:
    """Process ids of the ranks, by rank."""
    found = {}
    for child in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split():
        content = dict(
            entry.partition(b"=")[::2]
            for entry in Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        )
        if b"RANK" in content:
            found[int(content[b"RANK"])] = int(child)
    return found


def wait_for_steps(job: subprocess.Popen, run_dir: Path, steps: int, seconds: float = 100) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and job.poll() is None:
        records = read_metrics(run_dir / "metrics.jsonl")
        if records and records[-1]["step"] >= steps:
            return
        time.sleep(0.02)
    raise AssertionError(f"the job did not reach step {steps}")


def everything(run_dir: Path) -> dict[str, torch.Tensor]:
    """What a run has trained."""
    wanted = ("model/", "optimizer/", "tables/")
    return {
        name: value for name, value in saved_tensors(run_dir).items() if name.startswith(wanted)
    }


@pytest.fixture(scope="module")
def undisturbed(scratch):
    job = start(scratch, "whole")
    assert finish(job) == 0, (scratch / "whole.txt").read_text()
    return scratch / "whole"


def test_a_run_of_two_ranks_is_one_run(scratch, undisturbed):
    run = json.loads((undisturbed / "run.json").read_text())
    assert (run["status"], run["step"]) == ("finished", STEPS)
    records = [record for record in read_metrics(undisturbed / "metrics.jsonl") if "loss" in record]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    said = (scratch / "whole.txt").read_text()
    assert (
        said.count(f"finished after {STEPS} steps") == 2
    )  # the progress line's last word and the command's, from rank 0 alone
    store = SequenceStore.open(scratch / "store")
    train(RECIPE, store, scratch / "alone", quiet=True)
    _, _, together = open_run(undisturbed, which="last")
    _, _, alone = open_run(scratch / "alone", which="last")
    rows = [each.tables["item"].all_rows() for each in (together, alone)]
    assert torch.allclose(*rows, atol=1e-5, rtol=0)
    one_rank = [
        record for record in read_metrics(scratch / "alone" / "metrics.jsonl") if "loss" in record
    ]
    assert [r["loss"] for r in records] == pytest.approx([r["loss"] for r in one_rank], abs=1e-4)
    assert json.loads((scratch / "alone" / "run.json").read_text())["metrics"] == pytest.approx(
        run["metrics"], abs=1e-3
    )


def test_a_killed_rank_is_named_and_the_restarted_job_ends_equal(scratch, undisturbed):
    job = start(scratch, "killed", "--max-restarts", "1")
    wait_for_steps(job, scratch / "killed", 13)
    victim = workers(job)[1]
    os.kill(victim, signal.SIGKILL)
    assert finish(job) == 0, (scratch / "killed.txt").read_text()
    said = (scratch / "killed.txt").read_text()
    assert (
        f"error: rank 1 (process {victim} on " in said and "is dead or does not answer" in said
    ), said
    left, right = everything(undisturbed), everything(scratch / "killed")
    assert left.keys() == right.keys() and all(
        torch.equal(value, right[name]) for name, value in left.items()
    )
    kept = [
        [r for r in read_metrics(run / "metrics.jsonl") if "loss" in r]
        for run in (undisturbed, scratch / "killed")
    ]
    assert [(r["step"], r["loss"]) for r in kept[0]] == [(r["step"], r["loss"]) for r in kept[1]]


def test_a_signal_to_one_rank_stops_all_after_a_step(scratch):
    job = start(scratch, "stopped")
    wait_for_steps(job, scratch / "stopped", 6)
    os.kill(workers(job)[1], signal.SIGTERM)
    assert finish(job) == 0, (scratch / "stopped.txt").read_text()
    run = json.loads((scratch / "stopped" / "run.json").read_text())
    assert run["status"] == "interrupted" and 6 <= run["step"] < STEPS
    assert latest(scratch / "stopped" / "checkpoints").name == f"step-{run['step']:08d}"


def test_wrong_meshes_and_strangers_end_all_ranks(scratch, undisturbed):
    assert run_ranks(2, f"{__name__}:refused", scratch / "refused", scratch=str(scratch)) == [
        [
            "SlipstreamError",
            "holds a run of another recipe ('small')",
            "mesh 2x2 needs 4 ranks, but 2 were started",
        ],
        [
            "OtherRankError",
            "holds a run of another recipe ('small')",
            "mesh 2x2 needs 4 ranks, but 2 were started",
        ],
    ]


def refused(rank, world, scratch):
    store, said = SequenceStore.open(Path(scratch) / "store"), []
    for recipe, out in (
        (small_recipe(seed=9), "whole"),
        (small_recipe(train={"mesh": "2x2"}), "nowhere"),
    ):
        try:
            train(recipe, store, Path(scratch) / out, quiet=True)
        except Exception as error:
            said.append((type(error).__name__, str(error)))
    sentences = (
        "holds a run of another recipe ('small')",
        "mesh 2x2 needs 4 ranks, but 2 were started",
    )
    return [
        said[0][0],
        *(
            sentence
            for sentence, (_, text) in zip(sentences, said, strict=True)
            if sentence in text
        ),
    ]
