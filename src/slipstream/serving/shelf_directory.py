"""The directory of a deployment in shared memory: its host tiers, measured costs, sockets, beats.

Its supervisor holds a lock on it. A directory whose supervisor was killed is taken over by the next
one with the same state directory, so that prefixes outlive the supervisor. A supervisor of another
deployment marks it, and removes it where the mark is old: its own did not come back. Touch this
when a deployment keeps something else there.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

LOCK, MARK = "lock", "orphaned"
ORPHAN_SECONDS = 600.0  # after which the directory of a killed supervisor is removed


class ShelfDirectory:
    """A private directory that exists while its supervisor does."""

    def __init__(self, state: Path | None = None, place: Path | None = None) -> None:
        place = place or find_shared_memory()
        owner = "none"
        if state is not None:
            owner = hashlib.blake2b(str(state.resolve()).encode(), digest_size=8).hexdigest()
        start = f"slipstream-{os.getuid()}-"
        found: tuple[Path, int] | None = None
        for left in sorted(place.glob(f"{start}*")):
            lock = _lock(left)
            if lock is None:
                continue  # its supervisor lives, or it is not ours
            if found is None and left.name.startswith(f"{start}{owner}-") and owner != "none":
                (left / MARK).unlink(missing_ok=True)
                found = left, lock
                continue
            if left.name.startswith(f"{start}none-") or _is_orphan(left):
                shutil.rmtree(left, ignore_errors=True)
            os.close(lock)
        self.adopted = found is not None
        if found is None:
            # Under a name that no other supervisor looks at, until it is locked.
            hidden = Path(tempfile.mkdtemp(prefix=f".{start}{owner}-", dir=place))
            taken = _lock(hidden)
            assert taken is not None, "nobody else knows the directory"
            found = hidden.rename(place / hidden.name[1:]), taken
        self.path, self._lock_file = found

    def remove(self) -> None:
        """Delete the directory and what it holds."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1


def find_shared_memory() -> Path:
    """Return where shared memory is, or the directory of temporary files where there is none."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def _is_orphan(directory: Path) -> bool:
    """Mark a directory whose supervisor is gone; return whether it was marked long ago."""
    mark = directory / MARK
    try:
        return time.time() - mark.stat().st_mtime > ORPHAN_SECONDS
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            mark.touch(mode=0o600)
        return False


def _lock(directory: Path) -> int | None:
    """Lock a directory of this user; None where another supervisor has it."""
    try:
        about = directory.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
            return None
        file = os.open(
            directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file
