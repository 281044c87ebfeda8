"""The space `slipstream tune` searches: ranges of recipe keys, written as text, drawn by name.

    choice(a, b, c)   one of the values         uniform(a, b)   a number between
    int(a, b)         a whole number, ends too  log(a, b)       a number, evenly in its logarithm

A draw depends on (seed, trial, key) only, so more trials, or another order of keys, change none of
those before. Touch this when a range of another kind is needed.
"""

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from slipstream.config import resolve_key
from slipstream.errors import SlipstreamError, did_you_mean
from slipstream.training.recipe import Recipe

KINDS = ("choice", "uniform", "log", "int")
DIGITS = 4  # significant ones of a drawn number: enough to search, few enough to type
# Keys that would change what is measured, so that trials would not compare.
FIXED = ("name", "data", "task", "tasks", "split", "repeat", "train.metric", "train.loggers")
TRIES = 200  # draws for each trial before a small space counts as used up


@dataclass(frozen=True)
class Range:
    """What one key may be: `values` to choose from, or the two ends."""

    kind: str
    values: tuple[Any, ...]

    def draw(self, name: str) -> Any:
        """Return the value that belongs to a name."""
        numbers = random.Random(name)
        if self.kind == "choice":
            return self.values[numbers.randrange(len(self.values))]
        low, high = self.values
        if self.kind == "int":
            return numbers.randint(low, high)
        if self.kind == "log":
            found = math.exp(numbers.uniform(math.log(low), math.log(high)))
        else:
            found = numbers.uniform(low, high)
        return min(max(float(f"{found:.{DIGITS}g}"), low), high)

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(map(str, self.values))})"


def parse_range(key: str, text: str) -> Range:
    """Read a range, for example `log(1e-4, 1e-2)`."""
    found = re.fullmatch(r"\s*([A-Za-z_]+)\s*\((.*)\)\s*", text, re.DOTALL)
    if found is None:
        raise SlipstreamError(
            f"{key}={text} is no range; write choice(0.1, 0.2), uniform(0, 0.5), log(1e-4, 1e-2) "
            "or int(1, 8)"
        )
    kind, parts = found[1], _split(found[2])
    if kind not in KINDS:
        raise SlipstreamError(f"{key} has an unknown range '{kind}'{did_you_mean(kind, KINDS)}")
    if kind == "choice":
        return Range(kind, tuple(_value(key, part) for part in parts))
    ends = [_number(key, part, whole=kind == "int") for part in parts]
    if len(ends) != 2 or ends[0] >= ends[1]:
        raise SlipstreamError(
            f"{key}={text} needs two numbers, the smaller one first, for example {kind}(1, 8)"
        )
    if kind == "log" and ends[0] <= 0:
        raise SlipstreamError(f"{key}={text}: a logarithm needs numbers above 0; use uniform")
    return Range(kind, tuple(ends))


def _split(text: str) -> list[str]:
    """Split at the commas that stand outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        elif sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
        if sign == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


def _value(key: str, text: str) -> Any:
    """Read one value as a recipe would."""
    try:
        return _number(key, text, whole=False) if "e" in text.lower() else yaml.safe_load(text)
    except SlipstreamError:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise SlipstreamError(f"{key} cannot be '{text}', which is not a valid value") from None


def _number(key: str, text: str, *, whole: bool) -> Any:
    try:
        found = int(text) if whole else float(text)
    except ValueError:
        kind = "a whole number" if whole else "a number"
        raise SlipstreamError(f"{key} has an end '{text}', which is not {kind}") from None
    if not math.isfinite(found):
        raise SlipstreamError(f"{key} has an end '{text}', which is not finite")
    return found


def parse_space(over: Any) -> dict[str, Range]:
    """Read a space: texts `key=range`, or a mapping of keys to ranges or lists of values."""
    if isinstance(over, str) or not isinstance(over, Mapping | Sequence):
        raise SlipstreamError(f"over is a list of KEY=RANGE or a mapping, got {over!r}")
    pairs: list[tuple[str, Any]] = []
    if isinstance(over, Mapping):
        pairs = [(str(key).replace("__", "."), value) for key, value in over.items()]
    else:
        for text in over:
            key, equals, value = str(text).partition("=")
            if not equals:
                raise SlipstreamError(f"--over '{text}' is not of the form KEY=RANGE")
            pairs.append((key.strip(), value))
    if not pairs:
        raise SlipstreamError(
            "nothing to search; give at least one --over, for example "
            '--over "optimizer.lr=log(1e-4, 1e-2)"'
        )
    space: dict[str, Range] = {}
    for key, value in pairs:
        full = ".".join(resolve_key(Recipe, key, "the search space"))
        if any(full == fixed or full.startswith(f"{fixed}.") for fixed in FIXED):
            raise SlipstreamError(
                f"{full} decides what is measured or where, so trials over it would not compare; "
                "set it for all of them"
            )
        if full in space:
            raise SlipstreamError(f"{full} is searched twice; give one range")
        listed = isinstance(value, Sequence) and not isinstance(value, str) and value
        space[full] = Range("choice", tuple(value)) if listed else parse_range(full, str(value))
    return space


def draw_settings(space: Mapping[str, Range], trials: int, seed: int) -> list[dict[str, Any]]:
    """Return the settings of so many trials, no two alike; fewer where a space has no more."""
    found: list[dict[str, Any]] = []
    for number in range(trials * TRIES):
        drawn = {key: one.draw(f"{seed}/{number}/{key}") for key, one in space.items()}
        if drawn not in found:
            found.append(drawn)
        if len(found) == trials:
            break
    return found
