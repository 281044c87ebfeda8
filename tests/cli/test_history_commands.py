"""`slipstream history …` through the command line: import, export, users, delete, migrate."""

import asyncio
import csv
import json
import struct
from pathlib import Path

import polars as pl
import pytest
import redis

from slipstream.cli import history_commands
from slipstream.cli.app import run_command
from slipstream.serving.http.messages import RankRequest
from tests.support.history_stores import behaviours, columns, run
from tests.support.redis_server import free_port, redis_server
from tests.support.serving_service import context, opened_service
from tests.support.serving_stand_in import standin_scores
from tests.support.tiny_runs import BIG, prepare_store, write_log

USERS = ["-7", "a/b", "ann ü", "z", "日本"]


def write_text_log(path: Path) -> None:
    """A log of text ids with slashes, a minus and Unicode; user u has 3 + u behaviours."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["user_id", "item_id", "timestamp", "click"])
        for number, user in enumerate(USERS):
            for place in range(3 + number):
                rows.writerow([user, f"SKU/{place}-ü", 1_700_000_000 + place, place % 2])


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    write_text_log(tmp_path / "log.csv")
    return prepare_store(tmp_path, "--action-columns", "click")


def call(capsys: pytest.CaptureFixture[str], *words: object) -> dict:
    """Run `slipstream history` with --json and return what it prints."""
    capsys.readouterr()
    assert run_command(["history", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Run `slipstream history`, expect a refusal of one sentence and return it."""
    capsys.readouterr()
    assert run_command(["history", *map(str, words)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "Traceback" not in said
    return said


def test_trained_users_are_known_with_their_own_ids_and_actions(prepared, tmp_path, capsys):
    url = f"sqlite:{tmp_path / 'history.db'}"
    done = call(capsys, "import", prepared, "--history", url)
    assert done == {"users": 5, "behaviours": 3 + 4 + 5 + 6 + 7, "skipped": 0}
    for number, user in enumerate(USERS):
        places = range(3 + number)
        assert columns(run(url, lambda store, user=user: store.read(user, 100))) == (
            [f"SKU/{place}-ü" for place in places],
            [1_700_000_000 + place for place in places],
            {"click": [place % 2 for place in places]},
        )
    assert call(capsys, "users", "--history", url) == {"users": 5, "shown": USERS}
    shown = call(capsys, "users", "--history", url, "--limit", 2, "--after", "a/b")
    assert shown == {"users": 5, "shown": ["ann ü", "z"]}


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_context_is_imported_by_label_and_exported(tmp_path, capsys, form):
    log = {"user_id": [1, 1, 2], "item_id": [5, 6, 7], "timestamp": [1, 2, 3]}
    pl.DataFrame(log | {"surface": ["home", None, "cart"]}).write_csv(tmp_path / "log.csv")
    store = prepare_store(tmp_path, "--context-columns", "surface")
    url, out = f"sqlite:{tmp_path / 'history.db'}", tmp_path / f"out.{form}"
    call(capsys, "import", store, "--history", url)
    found = run(url, lambda store: store.read("1", 9))
    assert found.context["surface"].tolist() == ["home", ""]
    run(url, lambda store: store.append("0", behaviours([5], [9])))
    call(capsys, "export", "--history", url, "--out", out)
    told = pl.read_parquet(out) if form == "parquet" else pl.read_ndjson(out, infer_schema_length=9)
    assert told["context:surface"].to_list() == [None, "home", None, "cart"]


def test_numbers_are_imported_to_the_last_bit_and_users_as_text(tmp_path, capsys):
    write_log(tmp_path / "log.csv", users=6)
    url = f"sqlite:{tmp_path / 'history.db'}"
    call(capsys, "import", prepare_store(tmp_path), "--history", url)
    found = run(url, lambda store: store.read(str(BIG - 1), 100))
    assert found.items.tolist() == [BIG - (3 + place * 7) % 40 for place in range(5)]


@pytest.mark.parametrize(
    ("until", "left"), [("all", [3, 4, 5]), ("test", [3, 2, 3]), ("validation", [3, 1, 2])]
)
def test_held_out_behaviours_may_be_left_away(prepared, tmp_path, capsys, until, left):
    url = f"sqlite:{tmp_path / 'history.db'}"
    flags = ["--until", until, "--validation", "1", "--test", "2"]
    call(capsys, "import", prepared, "--history", url, *flags)
    lengths = [len(run(url, lambda store, u=user: store.read(u, 99))) for user in USERS[:3]]
    assert lengths == left  # a log too short to be split is imported as a whole


def test_an_import_is_repeated_without_harm_and_replaces_only_with_force(
    prepared, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(history_commands, "BATCH", 8)  # several transactions
    url = f"sqlite:{tmp_path / 'history.db'}"
    run(url, lambda store: store.append("z", behaviours(["new"], [1_750_000_000])))
    done = call(capsys, "import", prepared, "--history", url)
    assert done == {"users": 4, "behaviours": 3 + 4 + 5 + 7, "skipped": 1}
    again = call(capsys, "import", prepared, "--history", url)
    assert again == {"users": 0, "behaviours": 0, "skipped": 5}
    assert run(url, lambda store: store.read("z", 9)).items.tolist() == ["new"]
    assert run_command(["history", "import", str(prepared), "--history", url]) == 0
    assert "5 users have behaviours already and were skipped" in capsys.readouterr().out
    forced = call(capsys, "import", prepared, "--history", url, "--force")
    assert forced == {"users": 5, "behaviours": 25, "skipped": 0}
    assert len(run(url, lambda store: store.read("z", 9))) == 6


def test_times_after_now_are_refused_and_nothing_is_written(tmp_path, capsys):
    (tmp_path / "log.csv").write_text("user_id,item_id,timestamp\n1,2,1700000000\n1,3,5000000000\n")
    url = f"sqlite:{tmp_path / 'history.db'}"
    said = refused(capsys, "import", prepare_store(tmp_path), "--history", url)
    assert "user '1'" in said and "5000000000 lies more than a day after now" in said
    assert call(capsys, "users", "--history", url)["users"] == 0


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_an_export_is_a_log_that_can_be_prepared_and_imported_again(
    prepared, tmp_path, capsys, form, monkeypatch
):
    monkeypatch.setattr(history_commands, "BATCH", 8)
    url, out = f"sqlite:{tmp_path / 'history.db'}", tmp_path / f"out.{form}"
    call(capsys, "import", prepared, "--history", url)
    run(url, lambda store: store.append("42", behaviours([2**62 + 1], [5], timestamp=[0.5])))
    assert call(capsys, "export", "--history", url, "--out", out) == {"users": 6, "behaviours": 26}
    log = pl.read_parquet(out) if form == "parquet" else pl.read_ndjson(out, infer_schema_length=99)
    assert log["user_id"].unique().sort().to_list() == sorted([*USERS, "42"])
    part = log.filter(pl.col("user_id") == "ann ü")
    assert part["item_id"].to_list() == [f"SKU/{place}-ü" for place in range(5)]
    assert part["timestamp"].to_list() == [1_700_000_000 + place for place in range(5)]
    assert part["click"].to_list() == [0, 1, 0, 1, 0]
    other = log.filter(pl.col("user_id") == "42")
    assert str(other["item_id"][0]) == str(2**62 + 1) and other["action:timestamp"][0] == 0.5
    assert "exists already" in refused(capsys, "export", "--history", url, "--out", out)
    only = call(capsys, "export", "--history", url, "--out", out, "--user", "-7", "--force")
    assert only == {"users": 1, "behaviours": 3}
    if form == "parquet":
        words = ["data", "prepare", str(out), "--out", str(tmp_path / "again")]
        assert run_command([*words, "--action-columns", "click"]) == 0
        second = f"sqlite:{tmp_path / 'second.db'}"
        call(capsys, "import", tmp_path / "again", "--history", second)
        whole = run(url, lambda store: store.read("-7", 99))
        assert columns(run(second, lambda store: store.read("-7", 99))) == columns(whole)


def test_numbers_are_exported_as_numbers(tmp_path, capsys):
    url, out = f"sqlite:{tmp_path / 'history.db'}", tmp_path / "out.parquet"
    run(url, lambda store: store.append("ann", behaviours([2**63 - 1, -5], [1, 2])))
    call(capsys, "export", "--history", url, "--out", out)
    assert pl.read_parquet(out)["item_id"].to_list() == [2**63 - 1, -5]
    run(url, lambda store: store.delete("ann"))
    assert call(capsys, "export", "--history", url, "--out", out, "--force")["users"] == 0
    assert pl.read_parquet(out).height == 0


def test_an_imported_user_is_served_without_sending_a_history(tmp_path, capsys):
    with (tmp_path / "log.csv").open("w") as file:
        file.write("user_id,item_id,timestamp\n42,5,10\n42,6,20\n42,7,30\n")
    url = f"sqlite:{tmp_path / 'history.db'}"
    call(capsys, "import", prepare_store(tmp_path), "--history", url)

    async def work() -> dict:
        async with opened_service(tmp_path) as service:
            return (await service.rank(RankRequest("42", [1, 2]), context())).scores

    assert asyncio.run(work())["score"] == standin_scores([5, 6, 7], [10, 20, 30], [1, 2])


def test_users_are_forgotten(prepared, tmp_path, capsys):
    url = f"sqlite:{tmp_path / 'history.db'}"
    call(capsys, "import", prepared, "--history", url)
    deleted = call(capsys, "delete", "a/b", "日本", "nobody", "--history", url)
    assert deleted == {"deleted": {"a/b": 4, "日本": 7, "nobody": 0}}
    assert run_command(["history", "delete", "--history", url, "--", "-7", "nobody"]) == 0
    said = capsys.readouterr().out
    assert "-7: 3 behaviours deleted" in said and "nobody: nothing was stored" in said
    assert call(capsys, "users", "--history", url)["shown"] == ["ann ü", "z"]


def test_what_is_wrong_is_said_in_one_sentence_and_nothing_is_made(prepared, tmp_path, capsys):
    missing = f"sqlite:{tmp_path / 'none.db'}"
    for words in (["users"], ["delete", "ann"], ["export", "--out", tmp_path / "x.jsonl"]):
        assert "there is no history store" in refused(capsys, *words, "--history", missing)
    assert not (tmp_path / "none.db").exists() and not (tmp_path / "x.jsonl").exists()
    assert "no prepared data" in refused(capsys, "import", tmp_path, "--history", missing)
    assert not (tmp_path / "none.db").exists()
    assert "names no history store" in refused(capsys, "import", prepared, "--history", "x.db")
    down = refused(capsys, "import", prepared, "--history", "redis://u:geheim@127.0.0.1:1/0")
    assert "does not answer" in down and "geheim" not in down
    url = f"sqlite:{tmp_path / 'history.db'}"
    call(capsys, "import", prepared, "--history", url)
    said = refused(capsys, "export", "--history", url, "--out", tmp_path / "x.csv")
    assert ".parquet or .jsonl" in said
    nobody = ("--out", tmp_path / "x.jsonl", "--user", "nobody")
    assert "nothing is stored of user 'nobody'" in refused(
        capsys, "export", "--history", url, *nobody
    )
    assert not (tmp_path / "x.jsonl").exists()


def test_a_migration_of_the_present_format_has_nothing_to_do(tmp_path, capsys):
    url = f"sqlite:{tmp_path / 'history.db'}"
    run(url, lambda store: store.append("ann", behaviours([1])))
    assert call(capsys, "migrate", "--history", url) == {"migrated": 0}


@pytest.mark.system
def test_the_commands_on_redis(prepared, tmp_path, capsys):
    with redis_server(tmp_path, free_port()) as port:
        url, client = f"redis://127.0.0.1:{port}/0", redis.Redis(port=port)
        client.set("slipstream:actions", "")
        client.set("slipstream:h:{old}", struct.pack("<qq", 7, 50))
        said = refused(capsys, "users", "--history", url)
        assert f"slipstream history migrate --history {url}" in said
        assert call(capsys, "migrate", "--history", url) == {"migrated": 1}
        assert call(capsys, "import", prepared, "--history", url)["behaviours"] == 25
        assert call(capsys, "import", prepared, "--history", url)["skipped"] == 5
        users = call(capsys, "users", "--history", url)
        assert users == {"users": 6, "shown": sorted([*USERS, "old"])}
        out = tmp_path / "out.parquet"
        assert call(capsys, "export", "--history", url, "--out", out)["behaviours"] == 26
        assert call(capsys, "delete", "old", "--history", url) == {"deleted": {"old": 1}}
