"""How stores, runs, bundles and figures look in a notebook. Touch this to show them otherwise."""

import html
import math
from collections.abc import Mapping
from typing import Any


def card(title: str, facts: Mapping[str, Any]) -> str:
    """Return a small HTML table with a title; every text is escaped."""
    rows = "".join(
        f"<tr><td>{html.escape(str(name))}</td><td>{html.escape(shown(value))}</td></tr>"
        for name, value in facts.items()
    )
    return f"<table><caption>{html.escape(title)}</caption>{rows}</table>"


def shown(value: Any) -> str:
    """Return a figure as people read it: thousands grouped, four digits behind the point."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if math.isfinite(value) and value == int(value) and (isinstance(value, int) or value >= 2):
        return f"{int(value):,}"
    return f"{value:.4f}"
