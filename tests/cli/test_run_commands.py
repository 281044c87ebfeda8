"""The life of a run through the command line: prepare, train, evaluate, recommend, export, with the
real parts.
"""

import copy
import csv
import json
import subprocess
import sys

import pytest
import torch

from slipstream import api, bundle
from slipstream.cli.app import run_command
from slipstream.data.sampler import evaluation_batches
from slipstream.errors import SlipstreamError
from slipstream.training.recommendation import recommend
from slipstream.training.run import open_run
from tests.support.training_fixtures import recommender_of

BIG = 2**63 - 1  # original ids go up to here
TINY = (
    "model.dim=8",
    "blocks=1",
    "heads=1",
    "epochs=2",
    "threads=1",
    "negatives=4",
    "sampler.batch_size=8",
)


def write_log(path, users=20, actions=()):
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["user_id", "item_id", "timestamp", *actions])
        for user in range(users):
            for place in range(4 + user % 5):
                rows.writerow(
                    [
                        BIG - user,
                        BIG - (user * 3 + place * 7) % 40,
                        1000 + place,
                        *((user + place) % 2 for _ in actions),
                    ]
                )


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A prepared store and a tiny trained run."""
    place = tmp_path_factory.mktemp("runs")
    write_log(place / "log.csv")
    assert (
        run_command(["data", "prepare", str(place / "log.csv"), "--out", str(place / "store")]) == 0
    )
    assert (
        run_command(
            ["train", "ml-1m-hstu", f"data={place / 'store'}", *TINY, "--out", str(place / "run")]
        )
        == 0
    )
    return place


def test_training_leaves_a_complete_run(workplace):
    run = workplace / "run"
    note = json.loads((run / "run.json").read_text())
    assert note["status"] == "finished" and note["epoch"] == 2
    assert "<img" in (run / "report.html").read_text()
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_evaluate_notes_the_test_figures(workplace, capsys):
    assert run_command(["evaluate", str(workplace / "run")]) == 0
    assert "NDCG" in capsys.readouterr().out
    assert json.loads((workplace / "run" / "run.json").read_text())["test"]["users"] == 20
    assert run_command(["evaluate", str(workplace / "run"), "--sampled"]) == 0
    assert run_command(["evaluate", str(workplace / "run"), "--hide-request-time"]) == 0
    assert (
        run_command(["evaluate", str(workplace / "run"), "--hide-request-time", "--sampled"]) == 1
    )
    assert (
        json.loads((workplace / "run" / "run.json").read_text())["test_no_request_time"]["users"]
        == 20
    )


def test_recommend_shows_original_ids_and_leaves_seen_items_out(workplace, capsys):
    assert (
        run_command(["recommend", str(workplace / "run"), "--user", str(BIG - 3), "--count", "5"])
        == 0
    )
    assert str(BIG)[:12] in capsys.readouterr().out
    run = api.Run(workplace / "run")
    answer = run.recommend(BIG - 3, count=1000)
    log = set(
        run.store.items_N[
            run.store.offsets_U1[answer.user] : run.store.offsets_U1[answer.user + 1]
        ].tolist()
    )
    assert set(answer.items) == set(range(run.store.num_items)) - log
    assert answer.scores == sorted(answer.scores, reverse=True)


def test_a_bundle_answers_like_the_run(workplace):
    assert run_command(["export", str(workplace / "run"), "--out", str(workplace / "bundle")]) == 0
    opened = bundle.read_bundle(workplace / "bundle")
    run = api.Run(workplace / "run")
    again = recommend(recommender_of(opened), run.store, 2)
    first = recommend(run.recommender, run.store, 2)
    assert again == first
    changed = {**opened.tensors, "tables/item": opened.tensors["tables/item"] + 1}
    assert bundle.content_version({}, changed) != bundle.content_version({}, opened.tensors)


def test_a_ranking_run_recommends_by_its_first_action(tmp_path, capsys):
    write_log(tmp_path / "log.csv", actions=("click",))
    store = str(tmp_path / "store")
    assert (
        run_command(
            [
                "data",
                "prepare",
                str(tmp_path / "log.csv"),
                "--out",
                store,
                "--action-columns",
                "click",
            ]
        )
        == 0
    )
    ranking = [
        "task=ranking",
        "loss=bce",
        "tasks.click={column: click}",
        f"data={store}",
        "--out",
        str(tmp_path / "run"),
    ]
    assert run_command(["train", "ml-1m-hstu", *TINY, *ranking]) == 0
    assert run_command(["evaluate", str(tmp_path / "run")]) == 0
    assert "AUC" in capsys.readouterr().out
    answer = api.Run(tmp_path / "run").recommend(BIG - 1, count=3)
    assert len(answer.items) == 3 and all(0 < score < 1 for score in answer.scores)


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
    told = capsys.readouterr().err
    assert told.startswith("error: ") and sentence in told and "Traceback" not in told


def test_another_model_s_checkpoint_is_refused(workplace, capsys):
    assert (
        run_command(
            [
                "train",
                "ml-1m-hstu",
                f"data={workplace / 'store'}",
                *TINY,
                "model.dim=16",
                "--out",
                str(workplace / "run"),
            ]
        )
        == 1
    )
    assert "another recipe" in capsys.readouterr().err


def test_an_unknown_user_is_one_sentence(workplace, capsys):
    assert run_command(["recommend", str(workplace / "run"), "--user", "17"]) == 1
    assert "user '17' is not in this data" in capsys.readouterr().err


def test_a_damaged_bundle_is_one_sentence(workplace, tmp_path):
    with pytest.raises(SlipstreamError, match="is not a bundle"):
        bundle.read_bundle(tmp_path)
    good = tmp_path / "good"
    api.Run(workplace / "run").export(good)
    assert torch.is_tensor(bundle.read_bundle(good).tensors["tables/item"])
    (good / "weights.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(SlipstreamError, match="cannot be read"):
        bundle.read_bundle(good)


def test_torchrun_starts_one_rank(workplace, tmp_path):
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "1",
        "-m",
        "slipstream",
    ]
    arguments = [
        "train",
        "ml-1m-hstu",
        f"data={workplace / 'store'}",
        *TINY,
        "max_steps=2",
        "--out",
        str(tmp_path / "run"),
    ]
    ended = subprocess.run([*launcher, *arguments], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["step"] == 2


def test_users_with_one_and_with_a_hundred_thousand_behaviours_train_together(tmp_path):
    rows = [f"1,{place % 97},{place}" for place in range(100_000)] + ["2,5,1", "3,6,1", "3,7,2"]
    (tmp_path / "log.csv").write_text("user_id,item_id,timestamp\n" + "\n".join(rows) + "\n")
    store = str(tmp_path / "store")
    assert run_command(["data", "prepare", str(tmp_path / "log.csv"), "--out", store]) == 0
    assert (
        run_command(
            [
                "train",
                "ml-1m-hstu",
                f"data={store}",
                *TINY,
                "max_steps=2",
                "--out",
                str(tmp_path / "run"),
            ]
        )
        == 0
    )
    assert (
        api.Run(tmp_path / "run").evaluate()["users"] == 1
    )  # the others are too short to hold anything out


def test_a_run_refuses_data_that_changed_since(workplace, tmp_path, capsys):
    write_log(tmp_path / "log.csv")
    store, run = str(tmp_path / "store"), str(tmp_path / "run")
    assert run_command(["data", "prepare", str(tmp_path / "log.csv"), "--out", store]) == 0
    assert (
        run_command(["train", "ml-1m-hstu", f"data={store}", *TINY, "max_steps=1", "--out", run])
        == 0
    )
    write_log(tmp_path / "log.csv", users=21)
    assert (
        run_command(["data", "prepare", str(tmp_path / "log.csv"), "--out", store, "--force"]) == 0
    )
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
