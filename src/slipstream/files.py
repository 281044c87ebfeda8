"""Files and directories that are either whole or absent: written to a temporary path, then renamed.

Touch this when files must survive another kind of failure.
"""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError

# The description file by which a directory that a command wrote is recognised.
DESCRIPTIONS = {
    "store": "store.json",
    "run": "run.json",
    "bundle": "bundle.json",
    "tune": "tune.json",
}


def kind_of_directory(directory: Path) -> str | None:
    """Return what a directory holds: "store", "run", "bundle" or "tune"; None for anything else."""
    for kind, name in DESCRIPTIONS.items():
        if (directory / name).is_file():
            return kind
    return None


def check_output(
    out: str | os.PathLike[str],
    kind: str,
    *,
    force: bool = False,
    inputs: Iterable[str | os.PathLike[str]] = (),
) -> None:
    """Refuse a directory that a command must not write a `kind` ("store", "run", "bundle") into.

    It may be absent or empty. One of the same kind is replaced with `force`. Anything else is
    never touched: files of others, another kind, a directory that holds or lies in an input.
    """
    out = Path(out)
    target = out.resolve()
    for given in inputs:
        source = Path(given).resolve()
        if target == source or target in source.parents:
            raise SlipstreamError(
                f"--out {out} would overwrite its own input {given}; give another"
            )
        if source in target.parents and kind_of_directory(source) is not None:
            raise SlipstreamError(f"--out {out} lies inside its own input {given}; give another")
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir():
        raise SlipstreamError(f"{out} is a file, but a {kind} is a directory; give another --out")
    if not any(out.iterdir()):
        return
    found = kind_of_directory(out)
    if found is None:
        raise SlipstreamError(
            f"{out} is not empty and was not written by this command, so it is left alone; give "
            "another --out"
        )
    if found != kind:
        raise SlipstreamError(
            f"{out} holds a {found}, which a {kind} must not replace; give another --out"
        )
    if not force:
        raise SlipstreamError(
            f"{out} exists already; give another --out, or --force to replace this {kind}"
        )


def fsync_path(path: Path) -> None:
    """Flush a file or a directory to the disk, so that a rename after it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file another name; where the file system has no hard links, copy it."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        fsync_path(target)


@contextlib.contextmanager
def explained(target: Path) -> Iterator[None]:
    """Turn an OSError (a full disk, say) into a SlipstreamError that names `target`."""
    try:
        yield
    except OSError as error:
        raise SlipstreamError(
            f"could not write {target}: {error.strerror or error}; nothing was left behind"
        ) from error


@contextlib.contextmanager
def atomic_file(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path, which becomes `target` when the block ends without an error."""
    target = Path(target)
    with explained(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        os.close(descriptor)
        temporary = Path(name)
        try:
            yield temporary
            os.chmod(temporary, 0o644)
            fsync_path(temporary)
            os.replace(temporary, target)
            fsync_path(target.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_directory(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary directory, as `atomic_file`; it replaces `target` only when complete."""
    target = Path(target)
    with explained(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            yield temporary
            os.chmod(temporary, 0o755)
            for path in sorted(temporary.rglob("*")):
                fsync_path(path)
            fsync_path(temporary)
            if target.exists():
                old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
                os.replace(target, old / target.name)
                os.replace(temporary, target)
                shutil.rmtree(old, ignore_errors=True)
            else:
                os.replace(temporary, target)
            fsync_path(target.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def write_json(target: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as readable JSON, whole or not at all."""
    with atomic_file(target) as path:
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read JSON; a missing or damaged file is a `SlipstreamError` that names it."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SlipstreamError(f"{path} does not exist") from error
    except (OSError, ValueError) as error:
        raise SlipstreamError(f"{path} is not readable JSON: {error}") from error
