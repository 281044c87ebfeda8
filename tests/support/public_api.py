"""The public API as a document: docs/reference/api.md, one line per public name per room.

Run `python -m tests.support.public_api --write` after a room's `__all__` or a summary changes.
"""

import importlib
import inspect
import sys
from pathlib import Path

import slipstream

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "reference" / "api.md"
HEAD = """# Python API

What is listed here is public: it changes only with a line in the changelog. Everything else is
internal. This page is written by `python -m tests.support.public_api --write` from the rooms'
`__all__`; a test compares it with them.
"""


def rooms() -> list[str]:
    """The names of the rooms, as attributes of `slipstream`."""
    return [name for name in slipstream.__all__ if inspect.ismodule(getattr(slipstream, name))]


def public_names() -> dict[str, list[str]]:
    """{"": names of `slipstream` itself, room: names of its `__all__`}."""
    found = {"": [name for name in sorted(slipstream.__all__) if name not in rooms()]}
    for room in rooms():
        module = importlib.import_module(f"slipstream.{room}")
        found[room] = sorted(getattr(module, "__all__", []))
    return found


def summary(room: str, name: str) -> str:
    """The first line of a name's docstring, or the kind of value it is."""
    module = importlib.import_module(f"slipstream.{room}" if room else "slipstream")
    value = getattr(module, name)
    if inspect.ismodule(value) or inspect.isroutine(value) or inspect.isclass(value):
        own = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
        generated = inspect.isclass(value) and (own or "").startswith(f"{name}(")
        return "" if generated else inspect.cleandoc(own or "").partition("\n")[0]
    return f"A value of type `{type(value).__name__}`."


def line(room: str, name: str) -> str:
    """One entry of the document."""
    text = summary(room, name)
    place = f"ss.{room}.{name}" if room else f"ss.{name}"
    return f"- `{place}`: {text}" if text else f"- `{place}`"


def document() -> str:
    """The whole page."""
    parts = [HEAD, "## slipstream (`import slipstream as ss`)\n"]
    for room, names in public_names().items():
        if room:
            module = importlib.import_module(f"slipstream.{room}")
            about = inspect.cleandoc(module.__doc__ or "").partition("\n")[0]
            parts.append(f"## slipstream.{room}\n\n{about}\n")
        parts.append("\n".join(line(room, name) for name in names) + "\n" if names else "")
    return "\n".join(part for part in parts if part)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m tests.support.public_api --write")
    DOCUMENT.parent.mkdir(parents=True, exist_ok=True)
    DOCUMENT.write_text(document(), encoding="utf-8")
    print(f"{DOCUMENT} written")
