"""Cluster files are checked, and their errors say what to do."""

import pytest

from slipstream.errors import SlipstreamError
from slipstream.simulate.cluster import Cluster, open_cluster, shipped_clusters

PHASES = {"phases": {"compute": 10}}


@pytest.mark.parametrize("name", shipped_clusters())
def test_every_shipped_cluster_opens(name):
    assert open_cluster(name).name == name and open_cluster(f"{name}.yaml").samples > 0


def test_a_cluster_comes_from_a_file_or_from_values(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("workers: 4\nphases: {compute: 10}\n")
    assert open_cluster(path).name == "own"
    made = open_cluster(PHASES | {"workers": 4})
    assert isinstance(made, Cluster) and made.phases.compute.at(9) == 10.0
    assert open_cluster(made) is made


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("workers: 4", "give either workload or phases"),
        ("wrokers: 4\nphases: {compute: 1}", "did you mean 'workers'"),
        ("workers: 0\nphases: {compute: 1}", "workers"),
        ("workers: [", "not valid YAML"),
        ("- 1", "must be a mapping"),
        ("phases: {compute: 1, lookup: {shape: cubic}}", "cubic"),
    ],
)
def test_a_wrong_file_is_refused_in_a_sentence(tmp_path, content, words):
    path = tmp_path / "wrong.yaml"
    path.write_text(content)
    with pytest.raises(SlipstreamError, match=r"wrong\.yaml") as refused:
        open_cluster(path)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_an_unknown_name_lists_what_ships():
    with pytest.raises(SlipstreamError, match="nestpipe"):
        open_cluster("nestpip")
