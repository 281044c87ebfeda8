"""`slipstream evaluate --as-served` on a real server has the figures of the offline evaluation."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from slipstream.cli.app import run_command
from slipstream.files import read_json
from tests.support.tiny_runs import prepare_store
from tests.system.test_serve_command import KEY, served

MAX_LEN = 16
RECIPE = (
    "model.dim=8 blocks=1 heads=1 epochs=2 threads=1 negatives=4 sampler.batch_size=8 "
    f"time_bias=own model.max_len={MAX_LEN} sampler.max_len={MAX_LEN} window=stepped"
).split()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with repeats and with histories longer than the model, a run of it, and its bundle."""
    place, rng = tmp_path_factory.mktemp("served"), np.random.default_rng(3)
    rows = ["user_id,item_id,timestamp"]
    for user in range(40):
        taste = rng.integers(0, 300, 8)
        for moment in range(int(rng.integers(4, 60))):
            item = taste[rng.integers(8)] if rng.random() < 0.5 else rng.integers(0, 300)
            rows.append(f"{user},{item},{1000 + 60 * moment}")
    (place / "log.csv").write_text("\n".join(rows) + "\n")
    prepare_store(place)
    train = ["train", "ml-1m-hstu", f"data={place / 'store'}", *RECIPE]
    assert run_command([*train, "--out", str(place / "run")]) == 0
    assert run_command([*train, "seed=7", "--out", str(place / "other")]) == 0
    assert run_command(["export", str(place / "run"), "--out", str(place / "bundle")]) == 0
    return place


@pytest.fixture(scope="module")
def url(workplace: Path) -> Iterator[str]:
    with served(workplace / "bundle") as (address, _):
        yield address


def evaluated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, float]:
    capsys.readouterr()
    assert run_command(["evaluate", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["figures"]


@pytest.mark.parametrize("repeat", [(), ("--repeat", "allow"), ("--repeat", "exclude")])
def test_a_server_has_the_figures_of_the_offline_evaluation(
    workplace: Path,
    url: str,
    repeat: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLIPSTREAM_API_KEY", KEY)
    run = str(workplace / "run")
    offline = evaluated(capsys, run, *repeat)
    assert offline["repeats"] > 0.2
    assert offline["HR@10"] > 0
    assert evaluated(capsys, run, "--as-served", url, *repeat) == pytest.approx(offline)
    if not repeat:
        kept = read_json(workplace / "run" / "run.json")["test_as_served"]
        assert kept == pytest.approx(offline)


def test_a_server_of_another_model_is_refused(
    workplace: Path,
    url: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLIPSTREAM_API_KEY", KEY)
    assert run_command(["evaluate", str(workplace / "other"), "--as-served", url]) == 1
    message = capsys.readouterr().err
    assert "error: " in message
    assert "but this run is version" in message


def test_a_server_that_is_not_there_is_one_sentence(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = "http://127.0.0.1:1"
    assert run_command(["evaluate", str(workplace / "run"), "--as-served", nowhere]) == 1
    assert "is `slipstream serve` running there?" in capsys.readouterr().err
