"""A typed caller sees the right types: mypy over a script as a user would write it."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
from pathlib import Path

import polars as pl
import torch

import slipstream as ss


def share(places: torch.Tensor) -> float:
    return float((places <= 3).double().mean())


def margin(inputs: ss.training.RetrievalLossInputs) -> torch.Tensor:
    target_S, negative_SR = inputs.logits()
    return (1 - target_S.unsqueeze(1) + negative_SR).clamp(min=0).mean(1)


store = ss.prepare(pl.DataFrame(), Path("data/x"), user="u", item="i", actions=["a"])
reveal_type(store)
run = ss.train(store, metric=share, loss=margin, model={"dim": 32}, epochs=3)
reveal_type(run)
reveal_type(ss.load("runs/x"))
reveal_type(run.recommend("c/1", k=3, filter=lambda item: item != "x"))
reveal_type(run.evaluate(metric=[share]))
reveal_type(run.export("bundles/x"))
reveal_type(ss.compare([run, "runs/y"]))
ss.train(store, loss=share)
run.recommend(kk=3)
"""


OPTIONS = ("-m", "mypy", "--follow-imports=silent", "--ignore-missing-imports")


@pytest.mark.slow
def test_the_types_a_caller_sees(tmp_path):
    pytest.importorskip("mypy")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    source = Path(__file__).resolve().parents[2] / "src"
    ended = subprocess.run(
        [sys.executable, *OPTIONS, str(script)],
        cwd=tmp_path,
        env={"MYPYPATH": str(source), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=280,
    )
    revealed = [line.split('"')[1] for line in ended.stdout.splitlines() if "Revealed" in line]
    assert [name.rsplit(".", 1)[-1] for name in revealed] == [
        "SequenceStore",
        "Run",
        "SequenceStore",  # the last of a union
        "DataFrame",
        "Figures",
        "Path",
        "DataFrame",
    ], ended.stdout
    assert "Run | " in revealed[2] and "BundleModel" in revealed[2]
    errors = [line for line in ended.stdout.splitlines() if ": error:" in line]
    assert len(errors) == 2 and 'Unexpected keyword argument "kk"' in errors[1], errors
    assert 'Argument "loss"' in errors[0]
