"""Public names of a room, loaded when first asked for. Touch this when rooms export in another way."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def exporter(
    room: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make `__getattr__` and `__dir__` of a room from {public name: module it lives in}."""

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module '{room}' has no attribute '{name}'")
        return getattr(importlib.import_module(f"{room}.{modules[name]}"), name)

    return load, lambda: sorted(modules)
