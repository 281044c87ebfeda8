"""Bad input of every kind: one sentence that says what is wrong, no traceback, nothing written.

Commands and HTTP are here; wrong calls from Python are in tests/api/test_arguments.py.
"""

import http.client
import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from slipstream.cli.app import run_command
from tests.support.serve_command import KEY, served
from tests.support.tiny_runs import prepare_and_train

TINY = "model.dim=8 epochs=1 threads=1"
# What is typed, and a part of what is said.
COMMANDS = [
    ("nonsense", "no such command 'nonsense'"),
    ("train", "missing argument 'recipe'"),
    ("train ml-1m-hstu --bogus", "no such option: --bogus"),
    ("data prepare none.csv --out new", "none.csv does not exist"),
    ("data prepare ml-2m --out new", "did you mean 'ml-20m'"),
    ("data prepare 'no/*.csv' --out new", "no/*.csv"),
    ("data prepare empty.csv --out new", "is empty"),
    ("data prepare noise.parquet --out new", "could not be read"),
    ("data prepare log.csv --item-column item --out new", "did you mean 'item_id'"),
    ("data prepare log.csv --time-unit years --out new", "unknown time unit 'years'"),
    ("data prepare log.csv --out file", "is a file, but a store is a directory"),
    ("data prepare log.csv --out mine", "is not empty and was not written by this command"),
    ("data prepare log.csv --out mine --force", "is not empty"),
    ("data prepare log.csv --out run --force", "holds a run"),
    ("data prepare log.csv --out store", "--force to replace this store"),
    ("data prepare nulls.csv --nulls error --out new", "item column 'item_id' is empty (row 2)"),
    ("data prepare halves.csv --out new", "2.5"),
    ("data prepare log.csv --k-core 99 --out new", "(k_core 99) leave no behaviour"),
    ("data prepare log.csv --action-columns color --out new", "no column 'color'"),
    ("data prepare log.csv --items none.csv --item-id x --item-features y --out new", "none.csv"),
    ("data prepare log.csv --items log.csv --item-id sku --item-features y --out new", "'sku'"),
    ("data prepare --sql 'selec 1' --out new", "selec"),
    ("data inspect mine", "holds no prepared data"),
    ("data inspect store --plots mine", "mine"),
    ("train ml-1m-hsut data=store", "did you mean 'ml-1m-hstu'"),
    ("train ml-1m-hstu data=store shedule=nested", "did you mean 'schedule'"),
    ("train ml-1m-hstu data=store model.dim=wide", "model.dim"),
    ("train ml-1m-hstu data=store epochs=0", "epochs"),
    ("train ml-1m-hstu data=store loss=guess", "loss.kind"),
    ("train ml-1m-hstu data=mine", "holds no prepared data"),
    ("train ml-1m-hstu data=store epochs", "is not of the form key=value"),
    ("train broken.yaml data=store", "is not valid YAML"),
    ("train list.yaml data=store", "must be a mapping"),
    (f"train ml-1m-hstu data=store {TINY} item_features=[colour]", "no item feature 'colour'"),
    (f"train ml-1m-hstu data=store {TINY} sampler.max_len=999", "longer than model.max_len"),
    (f"train ml-1m-hstu data=store {TINY} --out mine", "is not empty"),
    (f"train ml-1m-hstu data=store {TINY} --out store", "store"),
    (f"train ml-1m-hstu data=store {TINY} --out bundle", "holds a bundle"),
    (f"train ml-1m-hstu data=store {TINY} --out run", "of another recipe"),
    ("evaluate mine", "run.json does not exist"),
    ("evaluate run --sampled --hide-request-time", "--sampled is a protocol of its own"),
    ("evaluate run --repeat maybe", "maybe"),
    ("evaluate run --data mine", "holds no prepared data"),
    ("evaluate run --as-served http://127.0.0.1:9", "no answer from http://127.0.0.1:9"),
    ("recommend run --user nobody", "'nobody' is not in this data"),
    ("recommend run --user 9223372036854775807 --count 0", "--count"),
    ("recommend run --user 9223372036854775807 --request-time 5", "before the user's last"),
    ("export run --out run", "its own input"),
    ("export run --out run/bundle", "its own input"),
    ("export run --out mine", "is not empty"),
    ("export run --out bundle", "--force to replace this bundle"),
    ("export mine --out new", "run.json does not exist"),
    ("compare run mine", "mine"),
    ("recipes nothing", "nothing"),
    ("serve mine", "is not a bundle"),
    ("serve damaged", "cannot be read"),
    ("serve bundle --history mysql:x", "names no history store"),
    ("serve bundle --history sqlite:log.csv", "log.csv"),
    ("serve bundle --host 0.0.0.0", "without an API key"),
    ("serve bundle --key-file none.txt", "cannot be read"),
    ("history import mine --history sqlite:new.db", "holds no prepared data"),
    ("history delete --history sqlite:none.db ann", "there is no history store"),
    ("history export --history sqlite:none.db --out x.parquet", "there is no history store"),
    ("client recommend ann --url http://127.0.0.1:9", "is `slipstream serve` running there?"),
    ("client events ann '[1, {}]' --url http://127.0.0.1:9", "is not a list of ids"),
    ("trace mine", "mine"),
]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a log, a store, a run, a bundle, files of others, and broken files."""
    place = prepare_and_train(tmp_path_factory.mktemp("bad"))
    assert run_command(["export", str(place / "run"), "--out", str(place / "bundle")]) == 0
    shutil.copytree(place / "bundle", place / "damaged")
    (place / "damaged" / "weights.safetensors").write_bytes(b"no weights")
    (place / "mine").mkdir()
    (place / "mine" / "thesis.tex").write_text("years of work")
    (place / "file").write_text("")
    (place / "empty.csv").write_text("")
    (place / "noise.parquet").write_bytes(bytes(range(256)))
    (place / "nulls.csv").write_text("user_id,item_id,timestamp\n1,5,9\n1,,9\n")
    (place / "halves.csv").write_text("user_id,item_id,timestamp\n1,2.5,9\n1,3,9\n")
    (place / "broken.yaml").write_text("model: {dim: 8\n")
    (place / "list.yaml").write_text("- 1\n")
    return place


def contents(place: Path) -> dict[str, int]:
    """Every file with the time of its last change."""
    return {
        str(path.relative_to(place)): path.stat().st_mtime_ns
        for path in sorted(place.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


@pytest.mark.parametrize(("line", "said"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_a_wrong_command_is_one_sentence_and_writes_nothing(
    workplace: Path,
    line: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(workplace)
    for name in ("SLIPSTREAM_URL", "SLIPSTREAM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    before = contents(workplace)
    capsys.readouterr()
    assert run_command(shlex.split(line)) in (1, 2)
    errors = capsys.readouterr().err
    assert contents(workplace) == before
    sentences = [text for text in errors.splitlines() if text.startswith("error: ")]
    assert len(sentences) == 1 and said in sentences[0], errors
    assert "Traceback" not in errors


# Path, body (bytes are sent as they are), status, and a part of what is said.
REQUESTS = [
    ("/v1/rank", b"", 400, "no body"),
    ("/v1/rank", b"{", 400, ""),
    ("/v1/rank", b"\xff\xfe", 400, ""),
    ("/v1/rank", {}, 400, "user"),
    ("/v1/rank", {"user": "", "candidates": [1]}, 400, "user"),
    ("/v1/rank", {"user": "ann", "candidates": []}, 400, "candidates"),
    ("/v1/rank", {"user": "ann", "candidates": [1.5]}, 400, "candidates"),
    ("/v1/rank", {"user": "ann", "candidates": [2**63]}, 400, ""),
    ("/v1/rank", {"user": "ann", "candidates": [1]}, 404, "nothing is stored of this user"),
    ("/v1/rank", {"user": "ann", "candidates": [1], "limit": 3}, 400, "limit"),
    ("/v1/rank", {"user": "a", "candidates": [1], "history": {"items": [1]}}, 400, ""),
    ("/v1/recommend", {"user": "ann", "count": 0}, 400, "count"),
    ("/v1/recommend", {"user": "ann", "count": "ten"}, 400, "count"),
    ("/v1/events", {"user": "ann", "items": [1], "timestamps": [1, 2]}, 400, "1 items but 2"),
    ("/v1/events", {"user": "ann", "items": [1, 2], "timestamps": [9, 8]}, 400, "go back"),
    (
        "/v1/events",
        {"user": "ann", "items": [1], "timestamps": [1_710_000_000_000]},
        400,
        "milliseconds",
    ),
    ("/v1/events", {"user": "ann", "items": ["x"], "timestamps": [5]}, 400, "no whole number"),
    ("/v1/nothing", {}, 404, ""),
]


@pytest.fixture(scope="module")
def url(workplace: Path) -> Iterator[str]:
    with served(workplace / "bundle", "--history", "sqlite:served.db") as (address, _):
        yield address


@pytest.mark.parametrize(("path", "body", "status", "said"), REQUESTS)
def test_a_wrong_request_is_one_sentence_and_stores_nothing(
    url: str, path: str, body: object, status: int, said: str
):
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
    headers = {"x-api-key": KEY, "content-type": "application/json"}
    try:
        connection.request("POST", path, sent, headers)
        answer = connection.getresponse()
        problem = json.loads(answer.read())
        assert answer.status == status, problem
        assert said in problem["detail"] and "Traceback" not in problem["detail"]
        connection.request("GET", "/v1/users/ann", headers=headers)
        after = connection.getresponse()
        assert (after.status, json.loads(after.read())["error"]) == (404, "unknown_user")
    finally:
        connection.close()
