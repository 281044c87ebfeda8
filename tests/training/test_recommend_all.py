"""All users at once: the answers of each alone, in parts that outlive a stop."""

import json

import pyarrow.parquet as pq
import pytest

from slipstream.cli.app import run_command
from slipstream.training import recommend_all
from slipstream.training.recommendation import recommend
from slipstream.training.run import open_run
from tests.support.tiny_runs import prepare_and_train


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    return prepare_and_train(tmp_path_factory.mktemp("runs"))


def ask(workplace, *more):
    out = workplace / "top.parquet"
    return run_command(["recommend", str(workplace / "run"), "--all", "--out", str(out), *more])


def expected(workplace, count):
    _, store, recommender = open_run(workplace / "run")
    return [
        {
            "user": store.users.id(each.user),
            "items": [store.items.id(row) for row in each.items],
            "scores": each.scores,
        }
        for each in recommend(recommender, store, range(store.num_users), count)
    ]


def test_a_stopped_command_goes_on_with_the_next_part(workplace, monkeypatch, capsys):
    monkeypatch.setattr(recommend_all, "PART_USERS", 6)
    answer, asked = recommend_all._answer, []

    def stopping(recommender, store, users, *more):
        asked.append(users[0])
        if len(asked) == 3:
            raise KeyboardInterrupt
        return answer(recommender, store, users, *more)

    monkeypatch.setattr(recommend_all, "_answer", stopping)
    parts = workplace / ".top.parquet.parts"
    assert ask(workplace, "--count", "4") != 0
    assert len(list(parts.glob("part-*.parquet"))) == 2 and not (workplace / "top.parquet").exists()
    assert ask(workplace, "--count", "4", "--json") == 0
    assert asked == [0, 6, 12, 12, 18]  # the first two parts were not made again
    users = json.loads(capsys.readouterr().out.splitlines()[-1])["users"]
    rows = pq.read_table(workplace / "top.parquet").to_pylist()
    assert rows == expected(workplace, 4) and users == len(rows) and not parts.exists()


def test_parts_of_another_question_are_not_used(workplace, monkeypatch):
    parts = workplace / ".top.parquet.parts"
    parts.mkdir()
    (parts / "question.json").write_text(json.dumps({"count": 3}))
    (parts / "part-000000.parquet").write_bytes(b"of another question")
    assert ask(workplace, "--count", "3", "--force") == 0
    assert pq.read_table(workplace / "top.parquet").to_pylist() == expected(workplace, 3)


def test_what_cannot_be_meant_is_one_sentence(workplace, capsys):
    (workplace / "top.parquet").touch()
    run = str(workplace / "run")
    for arguments, said in (
        (["recommend", run], "needs a user"),
        (["recommend", run, "--all"], "name it with --out"),
        (["recommend", run, "--user", "1", "--force"], "belong to --all"),
        (["recommend", run, "--all", "--out", "x", "--user", "1"], "asks for everybody"),
        (["recommend", run, "--all", "--out", str(workplace)], "is a directory"),
        (["recommend", run, "--all", "--out", str(workplace / "top.parquet")], "exists already"),
    ):
        assert run_command(arguments) == 1
        assert said in capsys.readouterr().err
