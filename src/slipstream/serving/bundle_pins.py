"""Pinned versions of a bundle: files that stay as they were, whatever is exported to its directory.

A supervisor keeps the files of a version open, and a directory of links leads to its open files
(`/proc/PID/fd/N`). So a version costs no disk and no copy, a bundle may lie on a read-only disk,
and an instance that crashes opens the version it served, never a newer one. Touch this when a
version is kept in another way.
"""

import json
import os
import shutil
from pathlib import Path

from slipstream.errors import SlipstreamError

DESCRIPTION, RETRIEVAL = "bundle.json", "retrieval"


class BundlePins:
    """The versions of a bundle that are pinned, each a directory below `place`.

    A deployment of two bundles has both in a version (`retrieval+ranking`): that of retrieval is a
    directory in the other.
    """

    def __init__(self, bundle: Path, place: Path, retrieval: Path | None = None) -> None:
        self._bundle, self._retrieval, self._place = bundle, retrieval, place
        self._files: dict[str, list[int]] = {}
        shutil.rmtree(place, ignore_errors=True)  # links to the files of an earlier supervisor
        place.mkdir(mode=0o700)

    def pin(self) -> str:
        """Pin what the bundle's directory holds now; return its version."""
        for last in (False, True):
            try:
                return self._pin()
            except FileNotFoundError as error:  # replaced while its files were opened
                if last:
                    raise SlipstreamError(
                        f"{self._bundle} is not a bundle, or is being replaced ({error.filename} "
                        "is missing); try again when it is whole"
                    ) from error
        raise AssertionError("the loop returns or raises")

    def path(self, version: str) -> Path:
        """Return the directory of a pinned version."""
        if version not in self._files:
            raise SlipstreamError(f"version {version} is not pinned; reload the bundle that has it")
        return self._place / version

    def keep(self, versions: set[str]) -> None:
        """Release every other version."""
        for version in set(self._files) - versions:
            shutil.rmtree(self._place / version, ignore_errors=True)
            for file in self._files.pop(version):
                os.close(file)

    def close(self) -> None:
        """Release every version."""
        self.keep(set())

    def _pin(self) -> str:
        """Open every file of the directories as it is now: a later one of its name is another."""
        parts = [(self._bundle, "")]
        if self._retrieval is not None:
            parts.insert(0, (self._retrieval, f"{RETRIEVAL}/"))
        files: dict[str, int] = {}
        try:
            for directory, start in parts:
                _open_files(directory, start, files)
            versions = [_read_version(files[start + DESCRIPTION], each) for each, start in parts]
            version = "+".join(versions)
            if version not in self._files:
                self._link(version, files)
                self._files[version] = list(files.values())
                files = {}
            return version
        finally:
            for file in files.values():
                os.close(file)

    def _link(self, version: str, files: dict[str, int]) -> None:
        """Make the directory of links, whole or not at all."""
        beside = self._place / f".{version}"
        shutil.rmtree(beside, ignore_errors=True)
        for name, file in files.items():
            link = beside / name
            link.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            link.symlink_to(f"/proc/{os.getpid()}/fd/{file}")
        beside.rename(self._place / version)


def _open_files(directory: Path, start: str, files: dict[str, int]) -> None:
    """Open the files of a directory, all of one state of it, under names that begin with start."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for entry in os.scandir(opened):
            if entry.is_file():
                file = os.open(entry.name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=opened)
                files[start + entry.name] = file
    finally:
        os.close(opened)
    if start + DESCRIPTION not in files:
        raise FileNotFoundError(2, "no such file", str(directory / DESCRIPTION))


def _read_version(file: int, bundle: Path) -> str:
    """Read the version in an open description; it becomes the name of a directory."""
    with open(os.dup(file), encoding="utf-8") as description:
        try:
            version = str(json.load(description)["version"])
        except (ValueError, KeyError, TypeError) as error:
            raise SlipstreamError(
                f"{bundle / DESCRIPTION} is not the description of a bundle; export it again"
            ) from error
    os.lseek(file, 0, os.SEEK_SET)
    if not version.isalnum() or len(version) > 128:
        raise SlipstreamError(f"{bundle / DESCRIPTION} has no usable version; export it again")
    return version
