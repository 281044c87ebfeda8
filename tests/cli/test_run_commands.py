"""A run through the command line: train, evaluate, recommend, export."""

import copy
import json
import shutil
import subprocess
import sys

import pytest
import torch

from slipstream import api
from slipstream.bundle import read_bundle
from slipstream.cli.app import run_command
from slipstream.data.sampler import evaluation_batches
from slipstream.training.run import open_run
from tests.support.tiny_runs import (
    BIG,
    TINY,
    prepare_and_train,
    prepare_store,
    train_tiny,
    write_log,
)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A prepared store and a tiny trained run."""
    return prepare_and_train(tmp_path_factory.mktemp("runs"))


def test_training_leaves_a_complete_run(workplace):
    run = workplace / "run"
    note = json.loads((run / "run.json").read_text())
    assert note["status"] == "finished" and note["epoch"] == 2
    assert "<img" in (run / "report.html").read_text()
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_evaluate_writes_its_figures_to_the_run(workplace, capsys):
    run = str(workplace / "run")
    assert run_command(["evaluate", run]) == 0
    assert "NDCG" in capsys.readouterr().out
    assert run_command(["evaluate", run, "--sampled"]) == 0
    assert run_command(["evaluate", run, "--hide-request-time"]) == 0
    assert run_command(["evaluate", run, "--hide-request-time", "--sampled"]) == 1
    note = json.loads((workplace / "run" / "run.json").read_text())
    assert note["test"]["users"] == note["test_no_request_time"]["users"] == 20


def test_evaluate_shows_popularity_repeats_cold_shares_and_rules(workplace, capsys):
    run = workplace / "run"
    assert run_command(["evaluate", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "popularity HR" in shown and "cold users 0.0%" in shown and "window: latest" in shown
    assert "repeat: exclude" in shown and "repeats" not in shown  # this log has none
    figures = json.loads((run / "run.json").read_text())["test"]
    assert run_command(["evaluate", str(run), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["figures"] == figures and answer["repeat"] == "exclude" and answer["slices"]
    assert run_command(["evaluate", str(run), "http://127.0.0.1:1"]) == 1
    assert "only with --as-served" in capsys.readouterr().err


def test_repeats_are_told_and_another_rule_recommends_them(tmp_path, capsys):
    rows = [f"{u},{(u + p) % 3},{p}" for u in range(12) for p in range(6)]
    (tmp_path / "log.csv").write_text("user_id,item_id,timestamp\n" + "\n".join(rows) + "\n")
    prepare_store(tmp_path)
    run = str(train_tiny(tmp_path, "max_steps=1"))
    capsys.readouterr()
    assert run_command(["evaluate", run]) == 0
    told = "repeat: exclude; 100.0% of the test items are repeats, which can never be hit"
    assert told in capsys.readouterr().out
    assert run_command(["evaluate", run, "--repeat", "allow"]) == 0
    shown = capsys.readouterr().out
    assert "repeat: allow; 100.0% of the test items are repeats\n" in shown
    for rule, count in (("allow", 3), ("exclude", 0)):
        words = ["recommend", run, "--user", "5", "--repeat", rule, "--json"]
        assert run_command(words) == 0
        answer = json.loads(capsys.readouterr().out)
        assert len(answer["items"]) == count and answer["user"] == 5


def test_a_run_is_opened_with_its_data_moved(workplace, tmp_path, capsys, monkeypatch):
    shutil.copytree(workplace / "store", tmp_path / "moved")
    shutil.copytree(workplace / "run", tmp_path / "run")
    note = json.loads((tmp_path / "run" / "run.json").read_text())
    note["store"]["directory"] = "gone"
    (tmp_path / "run" / "run.json").write_text(json.dumps(note))
    words = ["evaluate", str(tmp_path / "run")]
    assert run_command(words) == 1
    assert run_command([*words, "--data", str(tmp_path / "moved")]) == 0
    words = ["recommend", str(tmp_path / "run"), "--user", str(BIG), "--data", "moved"]
    monkeypatch.chdir(tmp_path)
    assert run_command(words) == 0


def test_a_request_time_before_the_last_behaviour_is_one_sentence(workplace, capsys):
    words = ["recommend", str(workplace / "run"), "--user", str(BIG), "--request-time"]
    assert run_command([*words, "5"]) == 1
    assert "before the user's last behaviour" in capsys.readouterr().err
    assert run_command([*words, "5000", "--json"]) == 0


def test_recommend_shows_original_ids_and_leaves_seen_items_out(workplace, capsys):
    words = ["recommend", str(workplace / "run"), "--user", str(BIG - 3), "--count", "5"]
    assert run_command(words) == 0
    assert str(BIG)[:12] in capsys.readouterr().out
    store = (run := api.Run(workplace / "run")).store
    answer, user = run.recommend(BIG - 3, k=1000), store.users.row(BIG - 3)
    log = store.items_N[store.offsets_U1[user] : store.offsets_U1[user + 1]].tolist()
    unseen = set(range(store.num_items)) - set(log)
    assert set(answer["item"]) == {store.items.id(row) for row in unseen}
    assert answer["score"].is_sorted(descending=True)


def test_export_writes_the_weights_of_the_run_and_prints_their_version(workplace, capsys):
    target = workplace / "bundle"
    assert run_command(["export", str(workplace / "run"), "--out", str(target)]) == 0
    opened = read_bundle(target)
    assert opened.version in capsys.readouterr().out
    recommender = api.Run(workplace / "run").recommender
    assert torch.equal(opened.tensors["tables/item"], recommender.tables["item"].all_rows())
    for name, value in recommender.model.state_dict().items():
        assert torch.equal(opened.tensors[f"model/{name}"], value)


def snapshot(directory):
    return {
        path.relative_to(directory): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("force", ([], ["--force"]))
@pytest.mark.parametrize("target", ("run", "store", "run/bundle", ".", "theirs", "file"))
def test_export_destroys_nothing_that_is_not_a_bundle(workplace, capsys, target, force):
    (workplace / "theirs").mkdir(exist_ok=True)
    (workplace / "theirs" / "notes.txt").write_text("not ours")
    (workplace / "file").write_text("not ours")
    before = snapshot(workplace)
    words = ["export", str(workplace / "run"), "--out", str(workplace / target), *force]
    assert run_command(words) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ") and "give another" in message
    assert snapshot(workplace) == before


def test_export_replaces_an_older_bundle_only_when_told_to(workplace, capsys):
    target = workplace / "replaced"
    words = ["export", str(workplace / "run"), "--out", str(target)]
    target.mkdir()  # an empty directory may be filled
    assert run_command(words) == 0
    before = snapshot(target)
    assert run_command(words) == 1 and "--force to replace this bundle" in capsys.readouterr().err
    assert snapshot(target) == before
    (target / "weights.safetensors").write_bytes(b"damaged")
    assert run_command([*words, "--force"]) == 0
    assert snapshot(target) == before


def test_a_ranking_run_recommends_by_its_first_action(tmp_path, capsys):
    write_log(tmp_path / "log.csv", actions=("click",))
    prepare_store(tmp_path, "--action-columns", "click")
    train_tiny(tmp_path, "task=ranking", "loss=bce", "tasks.click={column: click}")
    assert run_command(["evaluate", str(tmp_path / "run")]) == 0
    assert "AUC" in capsys.readouterr().out
    answer = api.Run(tmp_path / "run").recommend(BIG - 1, k=3)
    assert len(answer) == 3 and all(0 < score < 1 for score in answer["score"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "ml-1m-hst"], "there is no recipe 'ml-1m-hst'; did you mean 'ml-1m-hstu'"),
        (["train", "ml-1m-hstu", "data=nowhere"], "nowhere holds no prepared data"),
        (["train", "ml-1m-hstu", "shedule=nested"], "did you mean 'schedule'"),
        (["evaluate", "nowhere"], "nowhere"),
        (["recommend", "nowhere", "--user", "1"], "nowhere"),
        (["export", "nowhere", "--out", "x"], "nowhere"),
    ],
)
def test_mistakes_are_one_sentence(arguments, sentence, capsys):
    assert run_command(arguments) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ") and sentence in message and "Traceback" not in message


def test_another_model_s_checkpoint_is_refused(workplace, capsys):
    words = ["train", "ml-1m-hstu", f"data={workplace / 'store'}", *TINY, "model.dim=16"]
    assert run_command([*words, "--out", str(workplace / "run")]) == 1
    assert "another recipe" in capsys.readouterr().err


def test_an_unknown_user_is_one_sentence(workplace, capsys):
    assert run_command(["recommend", str(workplace / "run"), "--user", "17"]) == 1
    assert "user '17' is not in this data" in capsys.readouterr().err


@pytest.mark.system
def test_torchrun_starts_one_rank(workplace, tmp_path):
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 1 -m slipstream"
    recipe = ["train", "ml-1m-hstu", f"data={workplace / 'store'}", *TINY, "max_steps=2"]
    arguments = [*launcher.split(), *recipe, "--out", str(tmp_path / "run")]
    ended = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["step"] == 2


def test_users_with_one_and_with_a_hundred_thousand_behaviours_train_together(tmp_path):
    rows = [f"1,{place % 97},{place}" for place in range(100_000)] + ["2,5,1", "3,6,1", "3,7,2"]
    (tmp_path / "log.csv").write_text("user_id,item_id,timestamp\n" + "\n".join(rows) + "\n")
    prepare_store(tmp_path)
    run = train_tiny(tmp_path, "max_steps=2")
    assert api.Run(run).evaluate()["users"] == 1  # the others are too short to hold anything out


def test_a_run_refuses_data_that_changed_since(tmp_path, capsys):
    write_log(tmp_path / "log.csv")
    prepare_store(tmp_path)
    run = str(train_tiny(tmp_path, "max_steps=1"))
    write_log(tmp_path / "log.csv", users=21)
    prepare_store(tmp_path, "--force")
    assert run_command(["recommend", run, "--user", str(BIG)]) == 1
    assert "trained on other data" in capsys.readouterr().err


def test_a_query_never_knows_the_held_out_item(workplace):
    recipe, store, recommender = open_run(workplace / "run")
    changed = copy.copy(store)
    changed.items_N = store.items_N.copy()
    changed.items_N[store.offsets_U1[1:] - 1] = 0
    queries = [
        torch.cat(
            [
                recommender.queries_SD(batch)
                for batch in evaluation_batches(s, "test", max_len=recipe.sampler.max_len)
            ]
        )
        for s in (store, changed)
    ]
    assert torch.equal(*queries) and queries[0].shape[0] == store.num_users
