"""The arena: one split, one measure, contenders in processes of their own, and their rows.

No peer is installed here: small scripts stand in for peers, through the real contract.
"""

import json
import math
import os
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from rich.console import Console

from benchmarks.arena import cells, environments, report
from benchmarks.arena.cells import ContenderError, check_lists, run_cell
from benchmarks.arena.contenders import CONTENDERS, Contender, choose_contenders
from benchmarks.arena.contest import Entry, Plan, choose_data, make_cell, run_contest, split_of
from benchmarks.arena.data_sets import DATA_SETS, DataSet
from benchmarks.arena.environments import OWN
from benchmarks.arena.peers.contest_io import Clock
from benchmarks.arena.peers.contest_metrics import list_metrics
from benchmarks.arena.peers.contest_split import TEST, VALIDATION, Split
from benchmarks.arena.split_file import split_arrays, write_split
from benchmarks.arena.summary import make_claims, make_rows
from slipstream import api
from slipstream.config import RECIPES
from slipstream.errors import SlipstreamError
from tests.support.arena_entries import entry_of

PYTHON = environments.python_of(OWN, Path(), print)
POPULAR = """
    import os
    from pathlib import Path

    import numpy as np

    from benchmarks.arena.peers.contest_io import Contest, Job, time_single, users_to_time
    from benchmarks.arena.peers.contest_split import TEST, VALIDATION, Split

    job = Job.read()
    split = Split(job.split)
    contest = Contest(job, split)
    (job.out / "pid").write_text(str(os.getpid()))
    counts_I = np.bincount(split.items_N[split.rows(VALIDATION)], minlength=split.num_items)

    def score(users_B):
        return np.tile(counts_I.astype(np.float32), (len(users_B), 1))

    ends = False
    while not ends:
        with contest.clock.training():
            pass
        ends = contest.epoch_done(split.answer(VALIDATION, 10, score), lambda: None)
    top_UK = split.answer(TEST, job.k, score)
    single = time_single(lambda user: split.history(user, TEST), users_to_time(split))
    contest.finish(top_UK, single, ["numpy"])
"""
FAILS = "raise RuntimeError('the data set is too odd for this library')"
ENDLESS = """
    import os, sys, time
    from pathlib import Path
    Path(sys.argv[1]).with_name("pid").write_text(str(os.getpid()))
    line = '{"epoch": 1, "training_seconds": 1.0, "validation": {"NDCG@10": 0.5}}'
    Path(sys.argv[1]).with_name("progress.jsonl").write_text(line + chr(10))
    time.sleep(600)
"""
EMPTY = "print('nothing to do')"
TELLS = """
    import json, os, sys
    from pathlib import Path
    Path(sys.argv[1]).with_name("variables.json").write_text(json.dumps(dict(os.environ)))
"""


def fake(folder: Path, name: str, source: str, **settings) -> Contender:
    """A contender whose script is given by its source."""
    script = folder / f"{name}.py"
    script.write_text(textwrap.dedent(source))
    return Contender(name, OWN, script, "fake", {"epochs": 3, **settings})


@pytest.fixture(scope="module")
def made_up() -> DataSet:
    """A data set of a small log: 50 users, each of whom takes 12 of 60 items once."""
    draws = np.random.default_rng(5)
    items = np.concatenate([draws.permutation(60)[:12] for _ in range(50)])
    log = pl.DataFrame(
        {
            "user_id": np.repeat(np.arange(50), 12),
            "item_id": items,
            "timestamp": np.tile(np.arange(12) * 3600, 50),
        }
    )
    return DataSet("made-up", "a made-up log", lambda out: api.prepare(log, out, quiet=True))


@pytest.fixture
def by_hand(tmp_path):
    """A store of four users with 4, 2, 3 and 1 behaviours; ties keep the order of the rows."""
    log = pl.DataFrame(
        {
            "user_id": [1, 1, 1, 1, 2, 2, 3, 3, 3, 4],
            "item_id": [10, 30, 20, 40, 10, 20, 40, 10, 30, 20],
            "timestamp": [5, 5, 5, 9, 1, 2, 7, 8, 9, 4],
        }
    )
    return api.prepare(log, tmp_path / "store", quiet=True)


def plan_for(data: DataSet, work: Path, *contenders: Contender, **more) -> Plan:
    return Plan([data], contenders, work, threads=1, seeds=1, **more)


def cell_for(data: DataSet, work: Path, contender: Contender):
    """The one cell of a contender."""
    store = data.prepare(work / "data" / "store")
    split = split_of(store, work / "data")
    return make_cell(plan_for(data, work, contender), data, store, split, contender, 1)


def contest(plan: Plan) -> tuple[list[Entry], list[str]]:
    """Run a contest; return its entries and what was said."""
    said: list[str] = []
    return run_contest(plan, said.append, lambda entries: None), said


def assert_ended(cell: cells.Cell) -> None:
    """The process whose number a script has written down is gone."""
    with pytest.raises(ProcessLookupError):
        os.kill(int((cell.directory / "pid").read_text()), 0)


def test_the_split_holds_out_the_last_two_behaviours(by_hand):
    arrays = split_arrays(by_hand)
    assert arrays["offsets_U1"].tolist() == [0, 4, 6, 9, 10]
    assert arrays["users_N"].tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2, 3]
    assert arrays["items_N"].tolist() == [0, 2, 1, 3, 0, 1, 3, 0, 2, 1]
    assert arrays["train_lengths_U"].tolist() == [2, 2, 1, 1]
    assert arrays["validation_U"].tolist() == [1, -1, 0, -1]
    assert arrays["test_U"].tolist() == [3, -1, 2, -1]
    assert arrays["validation_times_U"].tolist() == [5, 0, 8, 0]
    assert arrays["test_times_U"].tolist() == [9, 0, 9, 0]
    assert int(arrays["num_items"]) == 4 and bool(arrays["timed"])


def test_contenders_read_the_split_as_it_was_written(by_hand, tmp_path):
    split = Split(write_split(by_hand, tmp_path / "split.npz"))
    assert split.askers(TEST).tolist() == [0, 2]
    assert split.history(0, VALIDATION).tolist() == [0, 2]
    assert split.history(0, TEST).tolist() == [0, 2, 1]
    assert split.history(1, TEST).tolist() == [0, 1]
    assert split.trained_I.tolist() == [True, True, True, True]
    assert split.asked_times(TEST, True)[[0, 2]].tolist() == [9, 9]
    assert split.asked_times(TEST, False)[[0, 2]].tolist() == [5, 8]
    best = split.best_rows(np.array([[4.0, 3.0, 2.0, 1.0]]), np.array([2]), TEST, 3)
    assert best.tolist() == [[1, 2, -1]]  # rows 3 and 0 are of the history


def test_a_log_without_times_has_places_for_times(tmp_path):
    log = pl.DataFrame({"user_id": [7, 7, 7], "item_id": [1, 2, 3]})
    arrays = split_arrays(api.prepare(log, tmp_path / "store", time=None, quiet=True))
    assert not arrays["timed"] and arrays["times_N"].tolist() == [0, 1, 2]


def test_a_log_that_cannot_be_split_is_refused(tmp_path):
    log = pl.DataFrame({"user_id": [7, 7], "item_id": [1, 2]})
    store = api.prepare(log, tmp_path / "store", time=None, quiet=True)
    with pytest.raises(SlipstreamError, match="three behaviours"):
        split_arrays(store)


def test_the_figures_of_lists_are_those_of_brute_force():
    draws = np.random.default_rng(4)
    top_UK = np.stack([draws.permutation(30)[:20] for _ in range(200)])
    top_UK[:5, 3:] = -1
    targets_U = draws.integers(-1, 30, size=200)
    found = list_metrics(top_UK, targets_U, (5, 10, 20))
    for k in (5, 10, 20):
        hits, gains, users = 0, 0.0, 0
        for row, target in zip(top_UK.tolist(), targets_U.tolist(), strict=True):
            if target < 0:
                continue
            users += 1
            if target in row[:k]:
                hits += 1
                gains += 1 / math.log2(row.index(target) + 2)
        assert found[f"HR@{k}"] == pytest.approx(hits / users)
        assert found[f"NDCG@{k}"] == pytest.approx(gains / users)
    assert 0 < found["NDCG@5"] < found["NDCG@20"] < 1


def test_figures_need_somebody_to_ask_and_lists_that_are_long_enough():
    with pytest.raises(ValueError, match="nothing to measure"):
        list_metrics(np.zeros((2, 10), dtype=np.int64), np.array([-1, -1]))
    with pytest.raises(ValueError, match="no HR@20"):
        list_metrics(np.zeros((1, 10), dtype=np.int64), np.array([3]), (20,))


def test_a_contender_is_run_measured_and_kept(made_up, tmp_path):
    plan = plan_for(made_up, tmp_path / "work", fake(tmp_path, "popular", POPULAR))
    entries, said = contest(plan)
    (sample,) = entries[0].samples
    assert entries[0].failure is None and sample["epochs"] == 3 and sample["stopped"] == "epochs"
    assert sample["peak_bytes"] >= sample["training_peak_bytes"] > 1 << 20
    assert len(sample["curve"]) == 3
    assert set(sample["test"]) == {f"{name}@{k}" for name in ("HR", "NDCG") for k in (10, 50, 200)}
    place = tmp_path / "work" / "cells" / "made-up" / "popular" / "seed1"
    split = Split(Path(json.loads((place / "job.json").read_text())["split"]))
    top_UK = np.load(place / "top.npy")
    assert sample["test"] == list_metrics(top_UK, split.test_U, (10, 50, 200))
    assert any("starts" in line for line in said)

    figures = json.loads((place / "figures.json").read_text())
    process = (place / "pid").read_text()
    again, said = contest(plan)
    assert again[0].samples == entries[0].samples and said[-1].endswith("kept")
    assert (place / "pid").read_text() == process
    (place / "figures.json").write_text(json.dumps({**figures, "epochs": 7}))
    assert contest(plan)[0][0].samples[0]["epochs"] == 7
    (place / "figures.json").write_text(json.dumps({"epochs": 7}))
    assert "its figures lack best_epoch" in contest(plan)[0][0].failure
    contest(replace(plan, minutes=5.0))  # another job, so the cell is run again
    assert (place / "pid").read_text() != process


def test_a_failing_contender_is_a_row_with_its_reason(made_up, tmp_path):
    broken = fake(tmp_path, "broken", FAILS)
    entries, _ = contest(
        plan_for(made_up, tmp_path / "work", broken, fake(tmp_path, "popular", POPULAR))
    )
    assert "the data set is too odd for this library" in entries[0].failure
    assert entries[1].failure is None
    rows = make_rows(entries)
    console = Console(record=True, width=report.WIDTH)
    report.show(report.make_result(rows, make_claims(rows), 1, 30.0), console)
    shown = console.export_text()
    assert "failed" in shown and "too odd for this library" in " ".join(shown.split())


def test_a_contender_without_answers_is_told(made_up, tmp_path):
    cell = cell_for(made_up, tmp_path, fake(tmp_path, "empty", EMPTY))
    with pytest.raises(ContenderError, match="ended without answers"):
        run_cell(cell, PYTHON, print)


def test_every_contender_has_the_same_threads_and_allocator(made_up, tmp_path):
    cell = cell_for(made_up, tmp_path, fake(tmp_path, "tells", TELLS))
    with pytest.raises(ContenderError):
        run_cell(cell, PYTHON, print)
    variables = json.loads((cell.directory / "variables.json").read_text())
    assert cells.ALLOCATOR.items() <= variables.items()
    assert variables["OMP_NUM_THREADS"] == "1" and variables["CUDA_VISIBLE_DEVICES"] == ""
    plain = replace(cell, contender=replace(cell.contender, keeps_memory=False))
    with pytest.raises(ContenderError):
        run_cell(plain, PYTHON, print)
    variables = json.loads((cell.directory / "variables.json").read_text())
    assert not cells.ALLOCATOR.keys() & variables.keys()


def test_a_contender_is_ended_after_its_limit(made_up, tmp_path):
    cell = cell_for(made_up, tmp_path, fake(tmp_path, "endless", ENDLESS))
    with pytest.raises(ContenderError, match=r"longer than 0\.005 minutes"):
        run_cell(replace(cell, limit_seconds=0.3), PYTHON, print)
    assert not cell.is_finished()


def test_an_interrupted_contest_ends_its_contender(made_up, tmp_path):
    cell = cell_for(made_up, tmp_path, fake(tmp_path, "endless", ENDLESS))

    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_cell(cell, PYTHON, interrupt)
    assert_ended(cell)


def test_an_epoch_far_over_the_budget_is_cut_short(made_up, tmp_path):
    slow = POPULAR.replace(
        "            pass", "            while not contest.cuts_epoch():\n                pass"
    )
    plan = plan_for(made_up, tmp_path, fake(tmp_path, "slow", slow), minutes=0.001)
    entries, _ = contest(plan)
    (sample,) = entries[0].samples
    assert sample["cut_short"] and sample["stopped"] == "budget" and sample["epochs"] == 1
    console = Console(record=True, width=report.WIDTH)
    entries.append(entry_of("rectools-hstu", [(9.0, 0.1)], 0.1, 1.0))
    report.show(report.make_result(make_rows(entries), {}, 1, 0.001), console)
    shown = " ".join(console.export_text().split())
    assert "its last epoch was cut short" in shown and "published .3226 and .1880" in shown


def test_lists_that_break_a_rule_are_refused(by_hand, tmp_path):
    split = Split(write_split(by_hand, tmp_path / "split.npz"))
    right_UK = np.full((4, cells.LIST_LENGTH), -1)
    right_UK[0, 0], right_UK[2, :2] = 3, [1, 2]
    check_lists(right_UK, split)
    for item, reason in ((4, "does not have"), (3, "twice"), (2, "history")):
        wrong_UK = right_UK.copy()
        wrong_UK[0, 1] = item
        with pytest.raises(ContenderError, match=reason):
            check_lists(wrong_UK, split)
    with pytest.raises(ContenderError, match="shape"):
        check_lists(right_UK[:, :10], split)
    split.trained_I[1] = False
    with pytest.raises(ContenderError, match="no training behaviour"):
        check_lists(right_UK, split)


def test_slipstream_takes_part_through_the_same_contract(made_up, tmp_path):
    chosen = choose_contenders(["slipstream-hstu", "slipstream-default"])
    entries, _ = contest(plan_for(made_up, tmp_path / "work", *chosen, quick=True))
    for entry in entries:
        assert entry.failure is None
        (sample,) = entry.samples
        best = next(line for line in sample["curve"] if line["epoch"] == sample["best_epoch"])
        assert sample["validation"] == pytest.approx(best["validation"])
        assert sample["lists_that_differ"] == 0
        assert 0 < sample["seconds_to_best"] <= sample["training_seconds"]
        assert sample["recommend_ms_p50"] > 0 and sample["epochs"] == 2


def test_a_clock_stops_at_its_mark(monkeypatch):
    moments = iter([0.0, 2.0, 10.0, 13.0, 20.0, 21.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(moments))
    clock = Clock()
    clock.start()
    clock.mark()  # at 2
    clock.stop_at_mark()
    assert clock.seconds == 2.0
    clock.start()  # at 10
    clock.stop()  # at 13
    assert clock.seconds == 5.0
    clock.start()  # at 20
    clock.stop_at_mark()  # the mark is of an earlier stretch
    assert clock.seconds == 5.0


def test_names_choose_contenders_and_data():
    assert {each.environment for each in choose_contenders(["rectools"])} == {"rectools"}
    assert [each.name for each in choose_contenders(["slipstream-hstu"])] == ["slipstream-hstu"]
    two = choose_contenders(["slipstream-default", "cornac"])  # in the order of the list
    assert [each.name for each in two] == ["cornac-sasrec", "slipstream-default"]
    assert "research-hstu" not in {each.name for each in choose_contenders(None)}
    (research,) = choose_contenders(["research-hstu"], checkout=Path("clone"))
    assert research.settings["checkout"].endswith("clone")
    with pytest.raises(SlipstreamError, match="--checkout"):
        choose_contenders(["research-hstu"])
    with pytest.raises(SlipstreamError, match="no contender 'rectool'"):
        choose_contenders(["rectool"])
    with pytest.raises(SlipstreamError, match="no data set 'ml-2m'"):
        choose_data(["ml-2m"], quick=False)
    assert [each.name for each in choose_data(None, quick=True)] == ["synthetic"]


def test_every_recipe_and_environment_of_a_contender_is_there():
    for contender in CONTENDERS:
        assert contender.script.is_file(), contender.name
        assert contender.own or contender.environment in environments.REQUIREMENTS
        if contender.own:
            assert (RECIPES / f"{contender.settings['recipe']}.yaml").is_file()


def test_a_contender_takes_part_where_it_differs_from_the_others():
    by_name = {each.name: each for each in CONTENDERS}
    assert by_name["rectools-hstu-no-time"].runs_on(DATA_SETS["ml-1m"], timed=True)
    assert not by_name["rectools-hstu-no-time"].runs_on(DATA_SETS["games"], timed=False)
    assert by_name["rectools-hstu-malloc"].runs_on(DATA_SETS["ml-1m"], timed=True)
    assert not by_name["rectools-hstu-malloc"].runs_on(DATA_SETS["ml-100k"], timed=True)


def test_short_histories_and_first_looks_have_settings_of_their_own():
    (sasrec,) = choose_contenders(["rectools-sasrec"])
    assert sasrec.settings_on(DATA_SETS["ml-1m"])["session_max_len"] == 200
    assert sasrec.settings_on(DATA_SETS["games"])["session_max_len"] == 50
    assert sasrec.settings_on(DATA_SETS["games"], quick=True)["epochs"] == 2


def test_texts_without_times_become_stores(tmp_path, monkeypatch):
    for name, text in (("games", "1 5\n1 6\n1 7\n2 5\n"), ("lastfm", "1 5 6 7\n2 5\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sequences.txt").write_text(text)
    monkeypatch.setenv("SLIPSTREAM_DATA", str(tmp_path))
    for name in ("games", "lastfm"):
        store = DATA_SETS[name].prepare(tmp_path / f"{name}-store")
        assert store.items_N.tolist() == [0, 1, 2, 0] and not store.timed
    with pytest.raises(SlipstreamError, match="SLIPSTREAM_DATA"):
        DATA_SETS["ml-latest-small"].prepare(tmp_path / "small")


def test_an_environment_is_used_again_while_its_list_is_the_same(tmp_path, monkeypatch):
    monkeypatch.setitem(environments.REQUIREMENTS, "peer", ("one==1",))
    directory = tmp_path / "environments" / "peer"
    (directory / "bin").mkdir(parents=True)
    (directory / "bin" / "python").write_text("")
    assert not environments.is_installed("peer", directory)
    note = {"requirements": environments.fingerprint("peer")}
    (directory / environments.INSTALLED).write_text(json.dumps(note))
    assert environments.python_of("peer", tmp_path, print) == directory / "bin" / "python"
    monkeypatch.chdir(tmp_path)  # contenders run in folders of their own
    assert environments.python_of("peer", Path(), print) == directory / "bin" / "python"
    monkeypatch.setitem(environments.REQUIREMENTS, "peer", ("one==2",))
    assert not environments.is_installed("peer", directory)


def test_what_cannot_be_installed_is_told_in_one_sentence(made_up, tmp_path, monkeypatch):
    monkeypatch.setitem(environments.REQUIREMENTS, "peer", (str(tmp_path / "absent.whl"),))
    peer = replace(fake(tmp_path, "popular", POPULAR), environment="peer")
    entries, _ = contest(plan_for(made_up, tmp_path / "work", peer))
    assert "could not be installed" in entries[0].failure
    assert not environments.is_installed("peer", tmp_path / "work" / "environments" / "peer")
