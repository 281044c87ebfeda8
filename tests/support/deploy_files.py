"""The files of deploy/ as tests read them, and the metrics and labels that their queries name."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
FUNCTIONS = {"sum", "rate", "changes", "histogram_quantile", "increase", "label_values", "count"}
GROUPING = re.compile(r"\b(by|without|ignoring|on)\s*\(([^)]*)\)")


def documents(name: str) -> list[Any]:
    """The documents of a YAML file."""
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


def document(name: str) -> Any:
    """The only document of a YAML file."""
    (only,) = documents(name)
    return only


def alerts() -> dict[str, str]:
    """The expression of each alert."""
    groups = document("prometheus/rules.yml")["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def board() -> Any:
    """The Grafana board."""
    return json.loads((DEPLOY / "grafana/boards/slipstream.json").read_text(encoding="utf-8"))


def queries() -> dict[str, str]:
    """Every query of deploy/, by where it stands."""
    found = {f"alert {name}": expr for name, expr in alerts().items()}
    for panel in board()["panels"]:
        for target in panel["targets"]:
            found[f"panel {panel['title']} {target['refId']}"] = target["expr"]
    for variable in board()["templating"]["list"]:
        found[f"variable {variable['name']}"] = variable["definition"]
    for rule in document("prometheus/adapter-rules.yml")["rules"]:
        found[f"adapter {rule['seriesQuery']}"] = rule["seriesQuery"]
    return found


def metrics_of(query: str) -> set[str]:
    """The metrics that a query reads; an unknown function or a lone word is an error."""
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]", " ", query)
    bare = GROUPING.sub(" ", bare)
    bare = re.sub(r"(label_values\(\s*\w+),\s*\w+", r"\1", bare)
    found = set()
    for word in re.finditer(r"[a-zA-Z_]\w*", bare):
        called = bare[word.end() :].lstrip().startswith("(")
        if called:
            assert word[0] in FUNCTIONS, f"{word[0]} is no known function: {query}"
        elif word[0] not in ("group_left",):
            found.add(word[0])
    return found


def labels_of(query: str) -> set[str]:
    """The labels that a query matches or groups by."""
    inside = " ".join(re.findall(r"\{([^}]*)\}", query))
    matched = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inside))
    grouped = {name.strip() for _, names in GROUPING.findall(query) for name in names.split(",")}
    named = set(re.findall(r"label_values\(\s*\w+,\s*(\w+)", query))
    return matched | grouped | named


def matched_values(query: str, label: str) -> set[str]:
    """The values that a query asks of a label by `=`."""
    return set(re.findall(rf'\b{label}="([^"]*)"', query))


def containerfile() -> list[tuple[str, str]]:
    """The instructions of the container file: word and rest, continuation lines joined."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined)]


def health_command() -> list[str]:
    """The words of the container's HEALTHCHECK."""
    (rest,) = [rest for word, rest in containerfile() if word == "HEALTHCHECK"]
    words: list[str] = json.loads(rest.partition("CMD ")[2])
    return words
