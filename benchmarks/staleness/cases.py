"""The problems of the staleness study: data, a small recipe, and the figures that are compared.

Two are real, one is made with a hot head, and one is a positive control in which staleness must
hurt; three more change one thing of the control each, to find what the damage depends on. Every
recipe trains a fixed number of epochs and is evaluated once, at the end, on the test behaviours:
nothing is chosen, so no choice adds noise. Touch this to add a problem.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.staleness.variants import BASELINE, STALE, VARIANTS
from slipstream.data.preparation import Choices, prepare
from slipstream.data.store import SequenceStore
from slipstream.data.synthetic import Synthetic
from slipstream.errors import SlipstreamError, did_you_mean

Progress = Callable[[str, int, int], None]
RETRIEVAL, RANKING = ("HR@10", "NDCG@10", "loss"), ("AUC", "loss")
BRIEFLY = (BASELINE, "semi_async_1", "semi_async_4")
ALL = tuple(variant.name for variant in VARIANTS)


@dataclass(frozen=True)
class Case:
    """One problem; `known` is a data set of the catalogue, otherwise the log is synthetic."""

    name: str
    about: str
    recipe: dict[str, Any]
    figures: tuple[str, ...]
    known: str | None = None
    synthetic: Synthetic | None = None
    variants: tuple[str, ...] = ALL


_HSTU: dict[str, Any] = {
    "kind": "hstu",
    "dim": 32,
    "blocks": 2,
    "heads": 1,
    "dropout": 0.1,
    "input_dropout": 0.1,
}
_TRAIN: dict[str, Any] = {
    "evaluate_every": 0,
    "checkpoint_every": 1_000_000_000,
    "keep_last": 1,
    "threads": 1,
    "tensorboard": False,
    "log_every": 1,
    "rank_timeout": 3600.0,
}

ML_1M = Case(
    "ml-1m",
    "MovieLens-1M, retrieval of the next movie",
    {
        "task": "retrieval",
        "model": {**_HSTU, "max_len": 100, "time_bias": "next"},
        "sampler": {"max_len": 100, "batch_size": 32},
        "loss": {"kind": "shared_softmax", "negatives": 512, "temperature": 0.05},
        "optimizer": {"lr": 3e-3},
        "tables": {"optimizer": "rowwise_adam", "lr": 5e-3},
        "train": {**_TRAIN, "epochs": 3},
    },
    RETRIEVAL,
    known="ml-1m",
)
KUAIRAND = Case(
    "kuairand-pure",
    "KuaiRand-Pure, the standard log, ranking by click and long view in one pass",
    {
        "task": "ranking",
        "tasks": {
            name: {"column": column, "threshold": 1}
            for name, column in (("click", "is_click"), ("long_view", "long_view"))
        },
        "model": {**_HSTU, "max_len": 50, "time_bias": "own"},
        "sampler": {"max_len": 50, "batch_size": 64, "min_len": 4},
        "split": {"validation": 1, "test": 2},
        "item_features": ["tag", "author_id"],
        "user_features": ["user_active_degree"],
        "loss": {"kind": "bce"},
        "optimizer": {"lr": 1e-3, "clip_norm": 1.0},
        "tables": {"optimizer": "rowwise_adagrad", "lr": 2e-2},
        "train": {**_TRAIN, "epochs": 1},
    },
    RANKING,
    known="kuairand-pure",
)
_ZIPF_RECIPE: dict[str, Any] = {
    "task": "retrieval",
    "model": {**_HSTU, "max_len": 50, "time_bias": "none"},
    "sampler": {"max_len": 50, "batch_size": 16},
    "loss": {"kind": "shared_softmax", "negatives": 256, "temperature": 0.05},
    "optimizer": {"lr": 1e-3},
    "tables": {"optimizer": "rowwise_adam", "lr": 2e-3},
    "train": {**_TRAIN, "epochs": 3},
}
_ZIPF = Synthetic(
    users=3000,
    items=10_000,
    topics=200,
    zipf=1.4,
    length_mu=4.0,
    length_sigma=0.5,
    length_max=200,
    seed=7,
)
ZIPF_HOT = Case(
    "zipf-hot",
    "synthetic, popularity rank^-1.4: a hot head",
    _ZIPF_RECIPE,
    RETRIEVAL,
    synthetic=_ZIPF,
)
_CROWDED = replace(_ZIPF, users=1000, items=500, topics=50)
_CONTROL_RECIPE: dict[str, Any] = {
    **_ZIPF_RECIPE,
    "sampler": {"max_len": 50, "batch_size": 4},
    "tables": {"optimizer": "rowwise_adagrad", "lr": 1.0},
    "train": {**_TRAIN, "epochs": 2},
}
CONTROL = Case(
    "control",
    "positive control: 500 items with a hot head, 256 negatives, batches of 4 users, a table "
    "learning rate of 1",
    _CONTROL_RECIPE,
    RETRIEVAL,
    synthetic=_CROWDED,
    variants=STALE,
)
CALM = replace(
    CONTROL,
    name="control-calm",
    about="the control with a table learning rate of 0.05",
    recipe={**_CONTROL_RECIPE, "tables": {"optimizer": "rowwise_adagrad", "lr": 0.05}},
    variants=BRIEFLY,
)
FLAT = replace(
    CONTROL,
    name="control-flat",
    about="the control with every item equally popular",
    synthetic=replace(_CROWDED, zipf=0.0),
    variants=BRIEFLY,
)
SPARSE = replace(
    CONTROL,
    name="control-sparse",
    about="the control with 16 negatives: fewer rows of a step were updated just before",
    recipe={**_CONTROL_RECIPE, "loss": {**_ZIPF_RECIPE["loss"], "negatives": 16}},
    variants=BRIEFLY,
)
CASES = {case.name: case for case in (ML_1M, KUAIRAND, ZIPF_HOT, CONTROL, CALM, FLAT, SPARSE)}
QUICK = Case(
    "quick",
    "synthetic, small: shows that everything runs, proves nothing",
    {
        **_ZIPF_RECIPE,
        "model": {**_HSTU, "dim": 8, "blocks": 1, "max_len": 20, "time_bias": "none"},
        "sampler": {"max_len": 20, "batch_size": 8},
        "loss": {"kind": "shared_softmax", "negatives": 16, "temperature": 0.05},
        "train": {**_TRAIN, "epochs": 2},
    },
    RETRIEVAL,
    synthetic=replace(_ZIPF, users=80, items=60, topics=8, length_mu=3.0, length_max=30),
)


def named_cases(names: tuple[str, ...]) -> list[Case]:
    """Return cases by name; no name means all."""
    for name in names:
        if name not in CASES:
            raise SlipstreamError(
                f"unknown data set '{name}' of the study{did_you_mean(name, CASES)}"
            )
    return [case for case in CASES.values() if not names or case.name in names]


def store_directory(case: Case, data: Path, out: Path) -> Path:
    """Return the directory of a case's store."""
    return data / case.known if case.known else out / "stores" / case.name


def open_store(
    case: Case, data: Path, out: Path, progress: Progress | None = None
) -> SequenceStore:
    """Open a case's store, which is prepared first where it is missing."""
    directory = store_directory(case, data, out)
    if not (directory / "store.json").exists():
        choices = Choices() if case.synthetic is None else Choices(synthetic=case.synthetic)
        return prepare(case.known or "synthetic", directory, choices, progress=progress)
    return SequenceStore.open(directory)
