"""Peers as files list them and names resolve to them; whatever cannot be read is one sentence."""

import threading
from pathlib import Path

import pytest

from slipstream.errors import SlipstreamError
from slipstream.serving.router import peers as module
from slipstream.serving.router.peers import (
    MAX_PEERS,
    InstanceAddress,
    PeersError,
    PeersFile,
    PeersName,
    parse_peers,
    parse_source,
    resolve,
)

TWO = [
    InstanceAddress("b-i-0", "http://10.0.0.2:9000"),
    InstanceAddress("b-i-1", "http://[fd00::2]:9001", "long"),
]
YAML = """
# of machine b
- {name: b-i-0, url: "http://10.0.0.2:9000"}
- name: b-i-1
  url: http://[fd00::2]:9001
  pool: long
"""
JSON_LINES = """{"name": "b-i-0", "url": "http://10.0.0.2:9000"}

{"name": "b-i-1", "url": "http://[fd00::2]:9001", "pool": "long"}
"""


@pytest.mark.parametrize("text", [YAML, JSON_LINES])
def test_a_list_is_yaml_or_json_lines(text: str):
    assert parse_peers(text, "it") == TWO
    assert parse_peers("[]", "it") == []


def line(name: str = "b", url: str = "http://b:1", more: str = "") -> str:
    return f'- {{name: "{name}", url: "{url}"{more}}}\n'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "write \\[\\] for no peers"),
        ("- {name: b", "is not a list of peers"),
        ('{"name": "b", "url": "http://b:1"}\n{"na', "is not a list of peers"),
        ("peers: 3", "is not a list of peers"),
        ("- {name: b}", "missing required field `url`"),
        (line(more=", pool: slow"), "Invalid enum value 'slow'"),
        (line(more=", port: 3"), "unknown field `port`"),
        (line(url="https://b:1"), "write it as http://HOST:PORT"),
        (line(url="http://b"), "write it as http://HOST:PORT"),
        (line(url="http://b:99999"), "write it as http://HOST:PORT"),
        (line(url="http://u:p@b:1"), "write it as http://HOST:PORT"),
        (line(url="unix:/run/x"), "write it as http://HOST:PORT"),
        (line(name="b 1"), "is no name of an instance"),
        (line(name='b\\"}'), "is no name of an instance"),
        (line() + line(url="http://b:2"), "the name 'b' stands twice"),
        (line() + line("c"), "the url 'http://b:1' stands twice"),
        ("[" * 2_000, "is not a list of peers"),
    ],
)
def test_a_damaged_list_is_one_sentence(text: str, sentence: str):
    with pytest.raises(PeersError, match=sentence) as refused:
        parse_peers(text, "the peers file p")
    assert str(refused.value).startswith("the peers file p") and "\n" not in str(refused.value)


def test_the_number_of_peers_is_bounded():
    many = "".join(line(f"b-{number}", f"http://b:{number}") for number in range(1, MAX_PEERS + 2))
    with pytest.raises(PeersError, match=f"takes {MAX_PEERS} at most"):
        parse_peers(many, "it")
    assert len(parse_peers("".join(many.splitlines(True)[1:]), "it")) == MAX_PEERS


def test_a_file_is_read_again_when_it_was_replaced_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    reads = []
    real = module.parse_peers
    monkeypatch.setattr(module, "parse_peers", lambda *parts: reads.append(1) or real(*parts))
    path = tmp_path / "peers.yaml"
    source = PeersFile(path)
    with pytest.raises(PeersError, match="cannot be read: No such file"):
        source.read()
    path.write_text(line())
    assert source.read() == source.read() == [InstanceAddress("b", "http://b:1")]
    beside = tmp_path / "new"
    for damaged in (b"- {", b"\xff\xfe", b"#" * (module.MAX_FILE_BYTES + 1)):
        beside.write_bytes(damaged)
        beside.replace(path)
        for _ in range(2):
            with pytest.raises(PeersError, match="the peers file"):
                source.read()
    beside.write_text(YAML)
    beside.replace(path)
    assert source.read() == TWO
    assert len(reads) == 3  # neither bytes that are not text nor a large file are parsed


def test_every_address_of_a_name_is_an_instance(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "RESOLVE_SECONDS", 0.0)
    answers = [["10.0.0.2", "[fd00::3]"], OSError(-2, "Name or service not known"), ["10.0.0.4"]]

    def look_up(name: str, port: int) -> list[str]:
        assert (name, port) == ("relay.internal", 9000)
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    source = PeersName("relay.internal", 9000, look_up)
    assert [peer.url for peer in source.read()] == ["http://10.0.0.2:9000", "http://[fd00::3]:9000"]
    with pytest.raises(PeersError, match="cannot be resolved: Name or service not known"):
        source.read()
    assert source.read() == [InstanceAddress("10.0.0.4:9000", "http://10.0.0.4:9000")]


def test_a_name_is_not_resolved_again_at_once():
    calls = []
    source = PeersName("b", 1, lambda *asked: calls.append(asked) or ["10.0.0.2"])
    assert source.read() == source.read()
    assert len(calls) == 1


def test_a_look_up_that_hangs_is_given_up_and_there_is_only_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "LOOKUP_SECONDS", 0.05)
    answered, calls = threading.Event(), []

    def look_up(name: str, port: int) -> list[str]:
        calls.append(name)
        answered.wait(60)
        return ["10.0.0.2"]

    source = PeersName("b", 1, look_up)
    for _ in range(3):
        with pytest.raises(PeersError, match="was not resolved within"):
            source.read()
    monkeypatch.setattr(module, "LOOKUP_SECONDS", 60.0)
    answered.set()
    assert [peer.name for peer in source.read()] == ["10.0.0.2:1"]
    assert len(calls) == 1


def test_the_names_of_this_machine_resolve():
    assert set(resolve("localhost", 1)) & {"127.0.0.1", "[::1]"}


def test_a_source_is_a_file_or_a_name():
    assert isinstance(parse_source("peers.yaml"), PeersFile)
    assert isinstance(parse_source("dns:relay.internal:9000"), PeersName)
    for text in ("dns:relay", "dns::9000", "dns:relay:0", "dns:relay:70000", "dns:relay:x"):
        with pytest.raises(SlipstreamError, match="write it as dns:NAME:PORT"):
            parse_source(text)
