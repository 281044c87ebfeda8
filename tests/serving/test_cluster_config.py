"""The flags about several machines: what is refused, which names and secrets follow."""

from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import SlipstreamError
from slipstream.serving import cluster_config
from slipstream.serving.cluster_config import (
    CLUSTER_KEY_VARIABLE,
    ClusterConfig,
    describe_peers,
    parse_listen,
    read_cluster,
)

CLUSTER_KEY = "a key that all machines of a cluster share"
REDIS = "redis://10.0.0.1:6379/0"


@pytest.fixture(autouse=True)
def key_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CLUSTER_KEY_VARIABLE, CLUSTER_KEY)


def read(**changes: Any) -> ClusterConfig | None:
    flags = {"listen": None, "peers": (), "machine": None, "key_file": None}
    return read_cluster(**{**flags, "history": REDIS, "instances": 1, "routers": 1, **changes})


def test_a_machine_that_is_alone_has_no_cluster():
    assert read() is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"instances": 0}, "--instances 0 needs --peers"),
        ({"routers": 0}, "--routers 0 needs --listen-instances"),
        ({"instances": 0, "peers": ["dns:b:9000"], "routers": 0, "listen": "::1"}, "nothing to"),
        ({"machine": "a"}, "are for --listen-instances and --peers"),
        ({"listen": "127.0.0.1:9000", "history": "sqlite:h.db"}, "share a history in SQLite"),
        ({"peers": ["dns:b:9000"], "history": "sqlite:h.db"}, "share a history in SQLite"),
        ({"peers": ["dns:b"]}, "write it as dns:NAME:PORT"),
        ({"peers": ["/none/peers.yaml"]}, "peers.yaml cannot be read"),
        ({"listen": "9000"}, "write --listen-instances HOST:PORT"),
        ({"listen": "::1:9000"}, "write --listen-instances HOST:PORT"),
        ({"listen": "127.0.0.1:65535", "instances": 2}, "2 instances need as many ports"),
        ({"listen": "127.0.0.1:9000", "machine": "a/b"}, "is no name of a machine"),
    ],
)
def test_flags_that_do_not_go_together_are_one_sentence(changes: dict[str, Any], sentence: str):
    with pytest.raises(SlipstreamError, match=sentence):
        read(**changes)


@pytest.mark.parametrize("flags", [{"listen": "127.0.0.1:9000"}, {"peers": ["dns:b:9000"]}])
def test_nothing_is_shared_between_machines_without_a_key(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any]
):
    monkeypatch.delenv(CLUSTER_KEY_VARIABLE)
    with pytest.raises(SlipstreamError, match="several machines need a cluster key"):
        read(**flags)
    monkeypatch.setenv(CLUSTER_KEY_VARIABLE, "short")
    with pytest.raises(SlipstreamError, match="at least 32 ASCII characters") as refused:
        read(**flags)
    assert "short" not in str(refused.value)


def test_the_key_is_read_of_a_file_that_others_cannot_read(tmp_path: Path):
    path = tmp_path / "cluster.key"
    path.write_text(f"{CLUSTER_KEY} of a file\n")
    path.chmod(0o604)
    with pytest.raises(SlipstreamError, match="every user can read the cluster key"):
        read(listen="127.0.0.1:9000", key_file=path)
    path.chmod(0o600)
    found = read(listen="127.0.0.1:9000", key_file=path)
    assert found is not None and found.key == f"{CLUSTER_KEY} of a file"


def test_machines_with_one_key_derive_the_same_secrets_and_do_not_show_it():
    one, other = ClusterConfig(CLUSTER_KEY, "a"), ClusterConfig(CLUSTER_KEY, "b")
    assert one.instance_key() == other.instance_key()
    assert one.ticket_secret() == other.ticket_secret()
    secrets = {CLUSTER_KEY, one.instance_key(), one.ticket_secret()}
    assert len(secrets) == 3
    assert ClusterConfig(f"{CLUSTER_KEY}!", "a").instance_key() not in secrets
    assert CLUSTER_KEY not in repr(one)


def test_a_machine_is_called_as_its_host_unless_it_has_a_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cluster_config.socket, "gethostname", lambda: "_a host.example")
    found = read(peers=["dns:b:9000"])
    assert found is not None and (found.machine, found.peers) == (
        "m_a-host.example",
        ("dns:b:9000",),
    )
    named = read(peers=["dns:b:9000"], machine="rack-7")
    assert named is not None and named.machine == "rack-7"


def test_addresses_to_listen_on_may_be_of_ipv6():
    assert parse_listen("0.0.0.0:9000", 2) == ("0.0.0.0", 9000)
    assert parse_listen("[fd00::1]:9000", 2) == ("fd00::1", 9000)


def test_the_sources_of_peers_are_described(tmp_path: Path):
    path = tmp_path / "peers.yaml"
    path.write_text("[]")
    assert describe_peers([str(path)]) == [f"peers: 0 instances of the peers file {path}"]
    path.write_text("{")
    with pytest.raises(SlipstreamError, match="is not a list of peers"):
        describe_peers([str(path)])
