"""The study's tables in Markdown: readable in a terminal, ready for a document."""

from typing import Any

from benchmarks.staleness.variants import BASELINE, BY_NAME


def markdown(summary: dict[str, Any]) -> str:
    """Make all tables of a summary."""
    parts = [
        f"{summary['runs_done']} of {summary['runs_planned']} runs, "
        f"{summary['cpu_seconds'] / 60:.0f} processor minutes.\n"
    ]
    parts += [case_table(case) for case in summary["cases"] if case["rows"]]
    parts.append(overview(summary))
    return "\n".join(parts)


def case_table(case: dict[str, Any]) -> str:
    """Make one row per variant.

    It has means, differences to the synchronous runs with 95 % intervals, p values and bits.
    """
    item = case["collisions"]["item"]
    shares = ", ".join(f"{100 * share:.0f} %" for share in item["keys"].values())
    reads = ", ".join(f"{100 * share:.0f} %" for share in item["reads"].values())
    seeds = max((len(row["seeds"]) for row in case["rows"]), default=0)
    lines = [
        f"### {case['case']}: {case['about']}",
        "",
        f"{case['store']['users']:,} users, {case['store']['items']:,} items, {case['steps']:,} "
        f"steps; seeds: {seeds}. Of the "
        f"{item['distinct']:,.0f} item rows a step reads, the last 1, 2, 4 steps had updated "
        f"{shares} "
        f"(of its reads {reads}; the hottest row in {100 * item['hottest']:.0f} % of the steps).",
        "",
    ]
    headings = ["variant", case["figures"][0]]
    for figure in case["figures"]:
        headings += [f"difference of {figure}", "p"]
    lines += [
        _line([*headings, "bits"]),
        _line(["---", "--:", *["--:"] * (2 * len(case["figures"])), "---"]),
    ]
    lines += [_line(_cells(row, case["figures"])) for row in case["rows"]]
    failed = [
        f"{row['variant']}, seed {seed}: {why}"
        for row in case["rows"]
        for seed, why in row["failed"].items()
    ]
    return "\n".join([*lines, *(["", "Failed: " + "; ".join(failed) + "."] if failed else []), ""])


def _cells(row: dict[str, Any], figures: list[str]) -> list[str]:
    main = figures[0]
    cells = [f"`{row['variant']}`", f"{row['mean'][main]:.4f}" if main in row["mean"] else "–"]
    for figure in figures:
        cells += difference_cells(row["difference"].get(figure))
    bits = row["bits"]
    if bits is None:
        return [*cells, ""]
    equal = f"= {bits['of']} ({bits['equal']}/{bits['compared']})"
    return [
        *cells,
        equal
        if bits["all_equal"]
        else f"**differ from {bits['of']}** ({bits['equal']}/{bits['compared']} equal)",
    ]


def difference_cells(found: dict[str, Any] | None) -> list[str]:
    """Format a difference with its interval and its p value, Holm's where several were tested."""
    if found is None:
        return ["", ""]
    if found["mean"] == 0 and found["deviation"] == 0:
        return ["0", ""]
    text = f"{found['mean']:+.4f} [{found['low']:+.4f}, {found['high']:+.4f}]"
    if "holm_p" not in found:
        return [text, f"({found['t_p']:.2f})"]
    p = found["holm_p"]
    return [text, "**< 0.001**" if p < 0.001 else f"**{p:.3f}**" if p < 0.05 else f"{p:.2f}"]


def overview(summary: dict[str, Any]) -> str:
    """Put collisions next to the relative change of the main figure, over all cases."""
    stale = [name for name, variant in BY_NAME.items() if variant.staleness and "late" not in name]
    stale.sort(key=lambda name: BY_NAME[name].staleness)
    headings = [
        "case",
        "rows updated 1 step before",
        "reads",
        "hottest",
        *(f"τ = {BY_NAME[name].staleness}" for name in stale),
    ]
    lines = ["### Collisions and the cost of staleness", "", _line([*headings, "found at 80 %"])]
    lines.append(_line(["---", *["--:"] * (len(headings))]))
    for case in summary["cases"]:
        rows = {row["variant"]: row for row in case["rows"]}
        figure, item = case["figures"][0], case["collisions"]["item"]
        base = rows.get(BASELINE, {"mean": {}})["mean"].get(figure)
        changes = [relative_change(rows.get(name), figure, base) for name in stale]
        shares = [item["keys"].get("1"), item["reads"].get("1"), item["hottest"]]
        detectable = [
            rows[name]["difference"][figure]["detectable"]
            for name in stale
            if figure in _differences(rows, name)
        ]
        found = f"{100 * max(detectable) / base:.2g} %" if detectable and base else ""
        percent = ["" if share is None else f"{100 * share:.0f} %" for share in shares]
        lines.append(_line([f"{case['case']} ({figure})", *percent, *changes, found]))
    return "\n".join([*lines, ""])


def _differences(rows: dict[str, Any], name: str) -> dict[str, Any]:
    return rows[name]["difference"] if name in rows else {}


def relative_change(row: dict[str, Any] | None, figure: str, base: float | None) -> str:
    """Format a difference in percent of the synchronous mean; bold when its interval excludes 0."""
    if row is None or figure not in row["difference"] or not base:
        return ""
    found = row["difference"][figure]
    mean, half = 100 * found["mean"] / base, 100 * (found["high"] - found["mean"]) / base
    text = f"{mean:+.1f} ± {half:.1f} %" if half >= 0.5 else f"{mean:+.2f} ± {half:.2f} %"
    return f"**{text}**" if found["low"] > 0 or found["high"] < 0 else text


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
