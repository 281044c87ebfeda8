"""The study from its command: exact schedules equal bit for bit, finished runs kept, clean stops.

Three variants are studied with the system tests, the whole quick study with the slow ones.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.command import function_app
from benchmarks.staleness import single_run
from benchmarks.staleness.bits import digest_in_memory
from benchmarks.staleness.cases import CASES, QUICK, named_cases, open_store
from benchmarks.staleness.collisions import collision_rates
from benchmarks.staleness.command import staleness
from benchmarks.staleness.cut_loop import train_plain_cut
from benchmarks.staleness.plan import Planned, plan
from benchmarks.staleness.study import run_study
from benchmarks.staleness.summary import summarise
from benchmarks.staleness.tables import markdown
from benchmarks.staleness.variants import BY_NAME, VARIANTS
from slipstream.cli.app import run_command
from slipstream.data.preparation import Choices, prepare
from slipstream.errors import SlipstreamError
from slipstream.tables.embedding_table import Rows

SHORT = ("--quick", "--variants", "dual_buffer", "--variants", "semi_async_1")


def run_staleness(*words: str) -> int:
    """Run the command of the study in this process."""
    return run_command(list(words), function_app(staleness))


@pytest.fixture(scope="module")
def short_study(tmp_path_factory):
    """The quick study of three variants, as a user starts it."""
    out = tmp_path_factory.mktemp("short")
    assert run_staleness(*SHORT, "--out", str(out), "--jobs", "1") == 0
    return out


@pytest.fixture(scope="module")
def studied(tmp_path_factory):
    """The whole quick study."""
    out = tmp_path_factory.mktemp("study")
    assert run_staleness("--quick", "--out", str(out), "--jobs", "1") == 0
    return out


@pytest.fixture
def store(tmp_path):
    return open_store(QUICK, tmp_path, tmp_path)


def rows_of(out: Path, variants: int = len(VARIANTS)) -> dict:
    summary = json.loads((out / "staleness.json").read_text())
    assert summary["runs_done"] == summary["runs_planned"] == 2 * variants
    return {row["variant"]: row for row in summary["cases"][0]["rows"]}


def test_an_exact_schedule_has_difference_zero_and_a_stale_one_has_not(short_study):
    rows = rows_of(short_study, variants=3)
    assert rows["dual_buffer"]["bits"]["all_equal"]
    assert rows["dual_buffer"]["samples"] == rows["synchronous"]["samples"]
    assert rows["dual_buffer"]["difference"]["loss"]["mean"] == 0
    assert rows["semi_async_1"]["difference"]["loss"]["mean"] > 0


@pytest.mark.slow
def test_exact_schedules_have_difference_zero(studied):
    rows = rows_of(studied)
    for name, partner in (
        ("dual_buffer", "synchronous"),
        ("nested", "plain_cut"),
        ("hsp", "one_replica"),
    ):
        assert rows[name]["bits"] == {"of": partner, "compared": 2, "equal": 2, "all_equal": True}
        assert rows[name]["samples"] == rows[partner]["samples"]
    difference = rows["dual_buffer"]["difference"]["loss"]
    assert (difference["mean"], difference["deviation"], difference["t_p"]) == (0, 0, 1)


@pytest.mark.slow
def test_stale_and_averaged_runs_really_differ(studied):
    results = {
        path.stem: json.loads(path.read_text()) for path in (studied / "results").glob("*.json")
    }
    bits = {name: results[f"quick-{name}-seed1"]["bits"] for name in BY_NAME}
    inexact = [name for name, variant in BY_NAME.items() if not variant.exact]
    assert len(inexact) == 6 and "semi_async_1_late" in inexact
    # The staleness of the late one begins after the quick study's end.
    apart = [name for name in inexact if name != "semi_async_1_late"]
    assert len({bits[name] for name in apart} | {bits["synchronous"]}) == len(apart) + 1
    assert bits["semi_async_1_late"] == bits["synchronous"]
    losses = {
        name: [results[f"quick-{name}-seed{seed}"]["figures"]["loss"] for seed in (1, 2)]
        for name in BY_NAME
    }
    for one, older in (
        ("synchronous", "semi_async_1"),
        ("semi_async_1", "semi_async_2"),
        ("semi_async_2", "semi_async_4"),
    ):
        assert all(a < b for a, b in zip(losses[one], losses[older], strict=True)), (
            one,
            older,
            losses,
        )


def test_tables_and_plots_are_written(short_study):
    text = (short_study / "staleness.md").read_text()
    assert "| `dual_buffer` |" in text and "= synchronous (2/2)" in text
    assert "Collisions and the cost of staleness" in text
    for picture in ("differences.png", "collisions.png"):
        assert (short_study / picture).read_bytes()[:4] == b"\x89PNG"
    assert not list(short_study.glob("session-*"))


def test_finished_runs_are_not_done_again(short_study):
    def written() -> dict[str, int]:
        return {p.name: p.stat().st_mtime_ns for p in (short_study / "results").iterdir()}

    before = written()
    assert run_staleness(*SHORT, "--out", str(short_study)) == 0
    assert written() == before


def test_a_result_that_is_torn_or_of_another_recipe_or_store_does_not_count(short_study, tmp_path):
    digest = open_store(QUICK, short_study, short_study).digest
    run = Planned(QUICK, BY_NAME["synchronous"], 1, digest)
    assert run.result(short_study) is not None
    assert replace(run, store_digest="other").result(short_study) is None
    longer = {**QUICK.recipe, "train": {**QUICK.recipe["train"], "epochs": 3}}
    assert replace(run, case=replace(QUICK, recipe=longer)).result(short_study) is None
    torn = run.result_path(tmp_path)
    torn.parent.mkdir()
    torn.write_text(run.result_path(short_study).read_text()[:100])
    assert run.result(tmp_path) is None


def test_a_broken_promise_fails_the_study(short_study, tmp_path):
    for path in (short_study / "results").glob("*.json"):
        content = json.loads(path.read_text())
        if path.stem == "quick-dual_buffer-seed2":
            content["bits"] = "0" * 64
        (tmp_path / "results").mkdir(exist_ok=True)
        (tmp_path / "results" / path.name).write_text(json.dumps(content))
    assert run_staleness(*SHORT, "--report", "--out", str(tmp_path)) == 1
    assert "**differ from synchronous** (1/2 equal)" in (tmp_path / "staleness.md").read_text()


def test_a_diverged_run_is_a_result_not_an_accident(store, tmp_path, monkeypatch):
    def diverge(*arguments, **options):
        raise SlipstreamError("the loss became nan at step 3; lower optimizer.lr")

    monkeypatch.setattr(single_run, "train", diverge)
    run = Planned(QUICK, BY_NAME["semi_async_4"], 1, store.digest)
    found = single_run.perform(run, store, tmp_path / "scratch")
    assert found["failed"].startswith("the loss became nan") and "figures" not in found
    (tmp_path / "results").mkdir()
    run.result_path(tmp_path).write_text(json.dumps(found))
    assert "Failed: semi_async_4, seed 1: the loss became nan" in markdown(
        summarise([run], {"quick": store}, tmp_path)
    )
    monkeypatch.setattr(
        single_run,
        "train",
        lambda *a, **o: (_ for _ in ()).throw(SlipstreamError("the disk is full")),
    )
    with pytest.raises(SlipstreamError, match="disk is full"):
        single_run.perform(run, store, tmp_path / "scratch")


def test_the_digest_sees_a_single_rounding(store):
    recipe = Planned(QUICK, BY_NAME["plain_cut"], 1, store.digest).recipe()
    other = recipe.model_copy(
        update={"train": recipe.train.model_copy(update={"micro_batches": 3})}
    )
    one, again, cut = (train_plain_cut(each, store) for each in (recipe, recipe, other))
    digests = [
        digest_in_memory(recommender, optimizer) for recommender, optimizer, _ in (one, again, cut)
    ]
    assert digests[0] == digests[1] != digests[2]
    assert one[2] == pytest.approx(
        cut[2], rel=1e-5
    )  # the two cuts differ by the order of sums only
    keys = torch.tensor([3])
    rows = one[0].tables["item"].read(keys)
    one[0].tables["item"].write(
        keys, Rows(torch.nextafter(rows.weights_UD, rows.weights_UD + 1), rows.state)
    )
    assert digest_in_memory(*one[:2]) != digests[0]


def test_collision_rates_counted_by_hand():
    from benchmarks.staleness.collisions import _of_table

    steps = [
        torch.tensor(keys).unique(return_counts=True)
        for keys in ([0, 1, 1], [1, 1, 2], [0, 3], [4, 4, 4, 0])
    ]
    found = _of_table(steps, rows=5)
    # One step back: {1} of {1, 2}; none of {0, 3}; {0} of {0, 4}. Two back: {0} of {0, 3}; {0} of
    # {0, 4}.
    assert found["keys"] == {
        "1": pytest.approx((1 / 2 + 0 + 1 / 2) / 3),
        "2": pytest.approx((1 / 2 + 1 / 2) / 2),
    }
    assert found["reads"] == {
        "1": pytest.approx((2 / 3 + 0 + 1 / 4) / 3),
        "2": pytest.approx((1 / 2 + 1 / 4) / 2),
    }
    assert found["hottest"] == pytest.approx(1 / 3) and found["distinct"] == 2


def test_negatives_count_as_keys(store):
    recipe = Planned(QUICK, BY_NAME["synchronous"], 1, store.digest).recipe()
    more = recipe.model_copy(update={"loss": recipe.loss.model_copy(update={"negatives": 40})})
    assert (
        collision_rates(more, store)["item"]["keys"]["1"]
        > collision_rates(recipe, store)["item"]["keys"]["1"]
        > 0
    )


def test_the_plan_asks_for_the_most_telling_runs_first():
    runs = plan(list(CASES.values()), {name: name for name in CASES}, [1, 2, 3])
    first = [run for run in runs if run.variant.turn == 0]
    assert runs[: len(first)] == first and {run.variant.name for run in first} == {
        "synchronous",
        "semi_async_1",
    }
    assert [run.variant.ranks for run in runs] == sorted(run.variant.ranks for run in runs)
    assert len({run.name for run in runs}) == len(runs) and len(
        {run.digest() for run in runs}
    ) == len(runs)


def test_variants_differ_in_the_named_settings_only():
    for case in CASES.values():
        base = (
            Planned(case, BY_NAME["synchronous"], 1, "")
            .recipe()
            .model_dump(mode="json", exclude={"name"})
        )
        for name in case.variants:
            other = (
                Planned(case, BY_NAME[name], 1, "")
                .recipe()
                .model_dump(mode="json", exclude={"name"})
            )
            changed = {
                (s, key)
                for s in ("train", "tables")
                for key in base[s]
                if base[s][key] != other[s][key]
            }
            named = {
                (s, key): value
                for s, values in BY_NAME[name].settings.items()
                for key, value in values.items()
            }
            assert changed == {
                (s, key) for (s, key), value in named.items() if base[s][key] != value
            }
            assert all(
                base[section] == other[section]
                for section in base
                if section not in ("train", "tables")
            )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--datasets", "ml-2m"], "unknown data set 'ml-2m' of the study; did you mean 'ml-1m'?"),
        (
            ["--quick", "--variants", "dual_bufer"],
            "unknown variant 'dual_bufer'; did you mean 'dual_buffer'?",
        ),
    ],
)
def test_wrong_names_are_one_sentence(tmp_path, capsys, arguments, sentence):
    assert run_staleness("--out", str(tmp_path), *arguments) == 1
    assert sentence in capsys.readouterr().err


def test_only_named_cases_are_studied():
    assert [case.name for case in named_cases(("control", "ml-1m"))] == ["ml-1m", "control"]
    assert len(named_cases(())) == len(CASES)


def test_two_studies_do_not_share_a_directory(tmp_path):
    import fcntl

    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SlipstreamError, match="another study is running"):
            run_study(tmp_path, tmp_path, seeds=2, quick=True)


@pytest.mark.slow
def test_ctrl_c_ends_cleanly_and_the_study_goes_on(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.environ["PYTHONPATH"], "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.staleness", *SHORT, "--jobs", "1"]
    study = subprocess.Popen(
        [*command, "--out", str(tmp_path)],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 200
        while (
            not list((tmp_path / "results").glob("*.json"))
            and time.monotonic() < deadline
            and study.poll() is None
        ):
            time.sleep(0.02)
        os.killpg(study.pid, signal.SIGINT)
        _, errors = study.communicate(timeout=80)
    finally:
        if study.poll() is None:
            os.killpg(study.pid, signal.SIGKILL)
    done = len(list((tmp_path / "results").glob("*.json")))
    assert study.returncode == 130 and 1 <= done < 6
    assert "of 6 runs done; the same command goes on" in errors and "Traceback" not in errors
    assert not list(tmp_path.glob("session-*"))
    summary = run_study(
        tmp_path, tmp_path, seeds=2, quick=True, jobs=1, variants=("dual_buffer", "semi_async_1")
    )
    assert (summary["runs_done"], summary["runs_planned"]) == (6, 6) and summary[
        "exact_schedules_exact"
    ]


def test_a_failing_worker_ends_the_study_with_its_reason(tmp_path):
    prepare("synthetic", tmp_path / "stores" / "quick", Choices(synthetic=QUICK.synthetic))
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "quick-synchronous-seed1.json").mkdir()  # cannot be replaced by a file
    with pytest.raises(
        SlipstreamError, match=r"a worker of the study failed: .*run the same command again"
    ):
        run_study(tmp_path, tmp_path, seeds=2, quick=True, jobs=1, variants=("dual_buffer",))
