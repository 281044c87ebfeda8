"""A group of commands whose modules are imported only when one of them is called.

Touch this when commands are found in another way. The tables of commands stand in app.py and
bench_commands.py.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from slipstream.errors import SlipstreamError


class CommandEntry(NamedTuple):
    """Where a command lives (`module:attribute`) and the line that the help shows for it."""

    place: str
    help: str


class LazyGroup(TyperGroup):
    """Shows its commands from a table and imports the one that is called."""

    entries: ClassVar[Mapping[str, CommandEntry]] = {}
    moved: ClassVar[Mapping[str, str]] = {}  # former name: its replacement

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, entry in self.entries.items():
            self.commands[name] = TyperCommand(name, help=entry.help)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the called command, or refuse a former name with its replacement."""
        for name in (" ".join(args[:2]), args[0]):
            if name in self.moved:
                raise SlipstreamError(f"'{name}' has moved; run: {self.moved[name]}")
        if args[0] in self.entries:
            self.commands[args[0]] = self.load(args[0])
        return super().resolve_command(ctx, args)

    def load(self, name: str) -> Any:
        """Import the command of an entry."""
        module, _, attribute = self.entries[name].place.partition(":")
        return make_command(name, getattr(importlib.import_module(module), attribute))


def make_command(name: str, source: typer.Typer | Callable[..., Any]) -> Any:
    """Make a function or a `Typer` into a command of the given name."""
    if not isinstance(source, typer.Typer):
        function = source
        source = typer.Typer(add_completion=False, rich_markup_mode="rich")
        source.command(name)(function)
    command = typer.main.get_command(source)
    command.name = name
    return command
