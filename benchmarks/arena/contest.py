"""The contest: every contender on every data set, one cell after the other.

Touch this when cells are planned in another order or when a job says something more.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import slipstream
from benchmarks.arena.cells import LIST_LENGTH, Cell, run_cell
from benchmarks.arena.contenders import Contender
from benchmarks.arena.data_sets import DATA_SETS, DataSet, open_store
from benchmarks.arena.environments import REQUIREMENTS, python_of
from benchmarks.arena.split_file import write_split
from slipstream.config import RECIPES
from slipstream.data.store import SequenceStore
from slipstream.errors import SlipstreamError, did_you_mean

SPARE_SECONDS = 600.0  # beyond four budgets: start-up, validation, answers, timing
Say = Callable[[str], None]
Sample = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What a contest runs, and with how much of everything."""

    data: Sequence[DataSet]
    contenders: Sequence[Contender]
    work: Path
    minutes: float = 30.0
    seeds: int = 3  # of Slipstream's contenders; peers run one
    threads: int = 2
    quick: bool = False


@dataclass(frozen=True)
class Entry:
    """A contender on a data set: its samples, one a seed, or the sentence that says why none."""

    data: DataSet
    contender: Contender
    samples: Sequence[Sample]
    failure: str | None = None
    timed: bool = True  # whether the data has times


def choose_data(names: Sequence[str] | None, *, quick: bool) -> list[DataSet]:
    """Return the data sets of these names, or those of a whole contest."""
    from benchmarks.arena.data_sets import QUICK

    chosen = names or ([QUICK] if quick else [name for name in DATA_SETS if name != QUICK])
    for name in chosen:
        if name not in DATA_SETS:
            raise SlipstreamError(
                f"there is no data set '{name}'{did_you_mean(name, DATA_SETS)}; the arena has "
                f"{', '.join(DATA_SETS)}"
            )
    return [DATA_SETS[name] for name in dict.fromkeys(chosen)]


def run_contest(plan: Plan, say: Say, finished: Callable[[list[Entry]], None]) -> list[Entry]:
    """Run every cell that is not done; call `finished` after every contender of a data set.

    All data is prepared first, so that missing data is told before hours have passed.
    """
    stores = {}
    for data in plan.data:
        say(f"preparing {data.name}")
        stores[data.name] = open_store(data, plan.work / "data" / data.name / "store")
    entries: list[Entry] = []
    for data in plan.data:
        store = stores[data.name]
        split = split_of(store, plan.work / "data" / data.name)
        for contender in plan.contenders:
            if not contender.runs_on(data, timed=store.timed):
                continue
            cells = [
                make_cell(plan, data, store, split, contender, seed)
                for seed in range(1, 1 + (plan.seeds if contender.own else 1))
            ]
            entry = run_entry(plan, data, contender, cells, say)
            entries.append(replace(entry, timed=store.timed))
            finished(entries)
    return entries


def split_of(store: SequenceStore, folder: Path) -> Path:
    """Return the split file of a store, written on first use."""
    path = folder / f"split-{store.digest[:12]}.npz"
    return path if path.is_file() else write_split(store, path)


def make_cell(
    plan: Plan, data: DataSet, store: SequenceStore, split: Path, contender: Contender, seed: int
) -> Cell:
    """Return a cell; its job holds all that decides its figures."""
    cells = plan.work / ("quick" if plan.quick else "cells")
    directory = cells / data.name / contender.name / f"seed{seed}"
    job = {
        "split": str(split.resolve()),
        "store": str(store.directory.resolve()),
        "out": str(directory.resolve()),
        "model": contender.model,
        "settings": contender.settings_on(data, quick=plan.quick),
        "seed": seed,
        "threads": plan.threads,
        "minutes": plan.minutes,
        "k": LIST_LENGTH,
        "request_time": contender.request_time,
        "keeps_memory": contender.keeps_memory,
        "requirements": requirements_of(contender),
    }
    limit = plan.minutes * 60.0 * 4 + SPARE_SECONDS
    return Cell(data.name, contender, seed, directory.resolve(), job, limit)


def requirements_of(contender: Contender) -> list[str]:
    """Return what a contender is made of; of ours, the version and the text of the recipe."""
    if not contender.own:
        return list(REQUIREMENTS[contender.environment])
    made_of = [f"slipstream=={slipstream.__version__}"]
    if "recipe" in contender.settings:
        recipe = RECIPES / f"{contender.settings['recipe']}.yaml"
        made_of.append(hashlib.blake2b(recipe.read_bytes(), digest_size=8).hexdigest())
    return made_of


def run_entry(
    plan: Plan, data: DataSet, contender: Contender, cells: Sequence[Cell], say: Say
) -> Entry:
    """Run the cells of one contender on one data set; its first failure ends it."""
    samples: list[Sample] = []
    for cell in cells:
        try:
            if cell.is_finished():
                say(f"{cell.title}: kept")
            else:
                python = python_of(contender.environment, plan.work, say)
                say(f"{cell.title}: starts")
                run_cell(cell, python, say)
            samples.append(cell.sample())
        except SlipstreamError as error:
            say(f"{cell.title}: {error}")
            return Entry(data, contender, (), str(error))
    return Entry(data, contender, samples)
