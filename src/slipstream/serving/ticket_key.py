"""The key that signs tickets, in a file of the state directory: tickets outlive a restart.

The file is made once, readable by its owner only, and never changed. Touch this when the key is
kept in another place.
"""

import os
import secrets
import stat
import tempfile
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.files import fsync_path

KEY_FILE = "ticket.key"
KEY_CHARACTERS = 64


def state_directory() -> Path:
    """Return where a user's programs keep what outlives them: $XDG_STATE_HOME/slipstream."""
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home) / "slipstream"


def read_ticket_key(directory: Path) -> str:
    """Return the key of a state directory; the first call makes it."""
    path = directory / KEY_FILE
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            _make_key(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, encoding="ascii") as file:
            status, key = os.fstat(descriptor), file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SlipstreamError(
            f"the ticket key {path} cannot be used ({reason}); choose another --state"
        ) from error
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise SlipstreamError(
            f"the ticket key {path} can be read by other users; delete it, and a new one is made"
        )
    if len(key) != KEY_CHARACTERS:
        raise SlipstreamError(f"the ticket key {path} is damaged; delete it, and a new one is made")
    return key


def _make_key(path: Path) -> None:
    """Write a key beside its place, then give it its name, unless another process was first."""
    descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(KEY_CHARACTERS // 2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(beside, path)
        except FileExistsError:
            return
        fsync_path(path.parent)
    finally:
        os.unlink(beside)
