"""`slipstream doctor`: what works on this machine, and what to do about what does not.

Touch this when a feature needs something else of a machine.
"""

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table

from slipstream.cli.output import JsonFlag, print_json

State = Literal["ok", "missing", "note"]
SHARED_MEMORY = "/dev/shm"
ENOUGH_SHARED = 1 << 30  # bytes: two instances with their host tier
ENOUGH_MEMORY = 4 << 30


@dataclass(frozen=True)
class Check:
    """One thing that was looked at; `todo` says what to do where it is not ok."""

    name: str
    state: State
    found: str
    todo: str = ""


def doctor(json: JsonFlag = False) -> None:
    """Tell what works on this machine: kernels, compiler, memory, device, tools, and what to do.

    Nothing is changed. What is missing only limits the features that its line names.
    """
    checks = [check() for check in CHECKS]
    if json:
        print_json([asdict(check) for check in checks])
        return
    table = Table(show_header=True)
    for heading in ("", "what", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    marks = {"ok": "[green]ok[/]", "missing": "[yellow]missing[/]", "note": "[dim]note[/]"}
    for check in checks:
        table.add_row(marks[check.state], check.name, check.found, check.todo)
    console = Console(highlight=False)
    console.print(table)
    missing = sum(check.state == "missing" for check in checks)
    console.print(
        "everything is here"
        if not missing
        else f"{missing} of {len(checks)} are missing; the last column says what to do"
    )


def _python() -> Check:
    import torch

    found = f"Python {platform.python_version()}, torch {torch.__version__}"
    return Check("Python and torch", "ok", found)


def _kernels() -> Check:
    from slipstream.ops import native

    status = native.status().removeprefix("native kernels: ")
    if "not built" in status:
        todo = "install g++ and install slipstream again; until then training is about 10x slower"
        return Check("native kernels", "missing", status, todo)
    todo = "install a compiler with OpenMP and build again" if "without OpenMP" in status else ""
    return Check("native kernels", "note" if todo else "ok", status, todo)


def _compiler() -> Check:
    names = [name for name in ("g++", "clang++", "c++") if shutil.which(name)]
    if names:
        return Check("C++ compiler", "ok", ", ".join(names))
    return Check(
        "C++ compiler", "missing", "none", "apt-get install g++ (only to build the kernels)"
    )


def _threads() -> Check:
    from slipstream.machine import measure_load

    load = measure_load()
    found = f"{load.cores} cores, {load.cores - load.others:.1f} free now"
    if load.quota < load.cores:
        found += f"; a quota allows {load.quota:g}"
    busy = load.others > load.cores / 2
    todo = "another program computes here; training takes only the free cores" if busy else ""
    return Check("cores", "note" if busy else "ok", found, todo)


def _memory() -> Check:
    pages, size = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    total, free = os.sysconf("SC_PHYS_PAGES") * size, pages * size
    found = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    if total < ENOUGH_MEMORY:
        return Check("memory", "note", found, "keep large tables on disk: tables.kind=disk")
    return Check("memory", "ok", found)


def _shared_memory() -> Check:
    if not os.path.isdir(SHARED_MEMORY):
        return Check("shared memory", "note", "none", "serving keeps its host tier in a file")
    free = shutil.disk_usage(SHARED_MEMORY).free
    found = f"{free / 2**30:.1f} GiB free in {SHARED_MEMORY}"
    if free < ENOUGH_SHARED:
        todo = "serve with a smaller --host-mb, or start the container with --shm-size 2g"
        return Check("shared memory", "note", found, todo)
    return Check("shared memory", "ok", found)


def _device() -> Check:
    import torch

    if torch.cuda.is_available():
        return Check("accelerator", "ok", torch.cuda.get_device_name(0))
    return Check("accelerator", "note", "none; everything runs on the CPU")


def _serving() -> Check:
    absent = [
        name
        for name in ("starlette", "uvicorn", "msgspec", "aiohttp", "prometheus_client")
        if importlib.util.find_spec(name) is None
    ]
    if absent:
        todo = "pip install 'slipstream[serving]'"
        return Check("serving", "missing", f"without {', '.join(absent)}", todo)
    return Check("serving", "ok", "the extra is installed")


def _tool(name: str, program: str, use: str) -> Callable[[], Check]:
    def check() -> Check:
        place = shutil.which(program) or (
            shutil.which("chromium-browser") if program == "chromium" else None
        )
        if place:
            return Check(name, "ok", place)
        package = {"ip": "iproute2"}.get(program, program)
        return Check(name, "missing", "not installed", f"apt-get install {package} ({use})")

    return check


def _namespaces() -> Check:
    if not sys.platform.startswith("linux"):
        return Check("network namespaces", "note", sys.platform, "measured on Linux only")
    if os.geteuid() != 0:
        return Check("network namespaces", "note", "not root", "benchmarks of slow links need root")
    return Check("network namespaces", "ok", "root")


CHECKS: tuple[Callable[[], Check], ...] = (
    _python,
    _kernels,
    _compiler,
    _threads,
    _memory,
    _shared_memory,
    _device,
    _serving,
    _namespaces,
    _tool("network tools", "ip", "for benchmarks of slow links"),
    _tool("Redis", "redis-server", "for histories on several machines, and tests"),
    _tool("Chromium", "chromium", "for the tests of the page"),
)
