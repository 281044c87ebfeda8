"""`slipstream plan` as a user types it."""

import json

import pytest
import yaml

from slipstream.cli.app import run_command
from tests.simulate.test_planner import SMALL


@pytest.fixture
def cluster(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return str(path)


def test_a_plan_is_printed_with_its_reasons(cluster, capsys):
    flags = ["--cluster", cluster, "--rate", "10", "--events", "5000", "--history", "100"]
    assert run_command(["plan", *flags, "--no-sensitivity"]) == 0
    printed = capsys.readouterr().out
    assert "serving instances" in printed and "tables: 10,000,000 rows" in printed


def test_a_check_compares_with_this_machine(cluster, capsys):
    flags = ["--cluster", cluster, "--rate", "5", "--events", "1000", "--history", "50"]
    assert run_command(["plan", *flags, "--no-sensitivity", "--check", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    (row,) = content["check"]
    assert row["measured_ms"] > 0 and row["predicted_ms"] > 0
    assert content["training"]["workers"] >= 1 and content["dollars_per_hour"] > 0


def test_a_cluster_without_a_workload_is_refused_in_a_sentence(capsys):
    assert run_command(["plan", "--cluster", "nestpipe"]) == 1
    assert "copy the shipped cluster file" in " ".join(capsys.readouterr().err.split())
