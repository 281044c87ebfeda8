"""The environments of the peers: what each needs, pinned, and how it is installed on first use.

Touch this to change a version. One virtual environment a peer stands below the work folder; it is
used again as long as its list of requirements stays the same.
"""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.files import write_json

TORCH = "torch==2.13.0"
# Pinned by hand: the peer, torch, and what the peer does not name itself. What pip then installed
# is written into the environment's note.
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "rectools": (TORCH, "rectools[torch]==0.19.0"),
    "replay": (
        TORCH,
        "replay-rec[torch]==0.22.0",
        "openvino==2026.4.1",
        "onnx==1.23.2",
        "onnxscript==0.7.2",
    ),
    "cornac": (TORCH, "cornac==3.0.1"),
    "recbole": (TORCH, "recbole==1.2.1", "numpy==1.26.4"),
    "research": (TORCH, "fbgemm-gpu-cpu==1.8.0", "gin-config==0.5.0", "numpy"),
}
OWN = "slipstream"  # this interpreter, and the sources of this tree
INSTALLED = "installed.json"
Say = Callable[[str], None]


def python_of(name: str, work: Path, say: Say) -> Path:
    """Return the interpreter of a peer's environment, which is installed if it must be."""
    if name == OWN:
        return Path(sys.executable)
    if name not in REQUIREMENTS:
        raise SlipstreamError(
            f"no environment '{name}' is declared in benchmarks/arena/environments.py; add its "
            "requirements there"
        )
    directory = (work / "environments" / name).absolute()  # contenders run in other folders
    if not is_installed(name, directory):
        install(name, directory, say)
    return directory / "bin" / "python"


def is_installed(name: str, directory: Path) -> bool:
    """Whether an environment is whole and has the present list of requirements."""
    note = directory / INSTALLED
    if not note.is_file() or not (directory / "bin" / "python").exists():
        return False
    found: dict[str, str] = json.loads(note.read_text(encoding="utf-8"))
    return found.get("requirements") == fingerprint(name)


def fingerprint(name: str) -> str:
    """Return a digest of a list of requirements and of the Python that installs it."""
    words = [*REQUIREMENTS[name], ".".join(map(str, sys.version_info[:2]))]
    return hashlib.blake2b("\n".join(words).encode(), digest_size=16).hexdigest()


def install(name: str, directory: Path, say: Say) -> None:
    """Make an environment anew and install its requirements; it counts when its note is written."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    log = directory.with_suffix(".log")
    say(f"installing {', '.join(REQUIREMENTS[name])} (a few minutes; see {log})")
    # This interpreter's pip installs into the other environment, which then needs none of its own.
    pip = [sys.executable, "-m", "pip", "--python", str(directory / "bin" / "python")]
    with log.open("wb") as file:
        for command in (
            [sys.executable, "-m", "venv", "--without-pip", str(directory)],
            [*pip, "install", *REQUIREMENTS[name]],
        ):
            done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False)
            if done.returncode:
                raise SlipstreamError(
                    f"the environment of '{name}' could not be installed ({last_line(log)}); see "
                    f"environments/{log.name} in the work folder, then run the same command again"
                )
    frozen = subprocess.run([*pip, "freeze"], capture_output=True, text=True, check=True)
    write_json(
        directory / INSTALLED,
        {"requirements": fingerprint(name), "versions": frozen.stdout.splitlines()},
    )


def last_line(log: Path) -> str:
    """Return the last line of a log that says something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    told = [line for line in lines if line and not line.startswith("WARNING")]
    return told[-1] if told else "it says nothing"
