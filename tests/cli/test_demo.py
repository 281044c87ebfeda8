"""The demo takes the best data that is available and ends with recommendations."""

import pytest

from slipstream import api
from slipstream.cli.app import run_command
from slipstream.cli.demo import demo_data
from slipstream.data.synthetic import Synthetic
from slipstream.errors import SlipstreamError
from tests.support.tiny_runs import TINY

HONEST_PREPARE = api.prepare


def prepare_synthetic_only(name, out, **choices):
    """What a machine without a network can prepare."""
    if name != "synthetic":
        raise SlipstreamError(f"{name} cannot be downloaded")
    return HONEST_PREPARE(name, out, synthetic=Synthetic(users=30, items=50, seed=1))


@pytest.mark.system
def test_without_a_network_the_demo_runs_on_synthetic_users(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(api, "prepare", prepare_synthetic_only)
    assert run_command(["demo", "--out", str(tmp_path), *TINY, "max_steps=2"]) == 0
    shown = capsys.readouterr().out
    assert "MovieLens-1M is not available" in shown
    assert (
        shown.startswith("This demo downloads MovieLens-1M") and "web page: slipstream ui" in shown
    )
    assert "version" in shown and "recommended" in shown and "ms in line" in shown
    assert "report.html" in shown
    assert (tmp_path / "bundle" / "bundle.json").is_file()


def test_data_prepared_before_are_used_again(tmp_path, capsys):
    (tmp_path / "ml-1m").mkdir()
    (tmp_path / "ml-1m" / "store.json").write_text("{}")
    assert demo_data(tmp_path, None) == tmp_path / "ml-1m"
    assert "prepared before" in capsys.readouterr().out


def test_a_local_source_is_the_second_choice(tmp_path, monkeypatch):
    tried = []

    def prepare(name, out, *, source=None, **choices):
        tried.append((name, source))
        if name == "ml-1m":
            raise SlipstreamError("no network")

    monkeypatch.setattr(api, "prepare", prepare)
    assert demo_data(tmp_path, tmp_path / "small") == tmp_path / "ml-latest-small"
    assert tried == [("ml-1m", None), ("ml-latest-small", tmp_path / "small")]
