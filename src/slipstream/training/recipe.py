"""The recipe: everything that decides what a run computes, typed, with unknown keys refused.

A run is a function of (recipe, store). The descriptions of the fields are their documentation and
what `--help` shows. Touch this when a run can be configured in another way, or when a new key must
keep the digests of earlier runs; the sections are in recipe_sections.py.
"""

import hashlib
import json
from collections.abc import Callable
from datetime import date
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from slipstream.data.sampler import SamplerConfig
from slipstream.data.splits import Split
from slipstream.errors import did_you_mean
from slipstream.models.model_config import ModelConfig
from slipstream.training.recipe_sections import (
    LossConfig,
    OptimizerConfig,
    RankingTask,
    Section,
    TablesConfig,
    TrainConfig,
)

Part = TypeVar("Part", bound=BaseModel)

# Keys younger than the digests of runs, as `section.key`, with the default that adds nothing.
YOUNGER_KEYS: dict[str, Any] = {
    "context_features": [],
    "fit_to_data": False,
    "item_vectors": [],
    "number_bins": 16,
    "number_scaling": "quantile",
    "repeat": "exclude",
    "sampler.windows": 1,
    "tables.by_name": {},
    "train.accumulate": 1,
    "train.precision": "fp32",
    "window": "latest",
}


def _known_split_keys(value: Any) -> Any:
    known = Split.__dataclass_fields__
    for key in value if isinstance(value, dict) else ():
        if key not in known:
            raise ValueError(f"unknown key '{key}' in split{did_you_mean(key, known)}")
    if not isinstance(value, dict):
        return value
    # YAML reads 2024-05-01 as a date.
    return {k: v.isoformat() if isinstance(v, date) else v for k, v in value.items()}


def _all_defaults(section: type[Part]) -> Callable[[], Part]:
    return lambda: section.model_validate({})


class Recipe(Section):
    """One run, complete."""

    name: str = Field(description="name of the recipe; the default run directory is runs/<name>")
    data: str | None = Field(None, description="directory of the sequence store")
    task: Literal["retrieval", "ranking"] = Field(
        "retrieval", description="predict the next item, or an item's actions"
    )
    tasks: dict[str, RankingTask] = Field(
        default_factory=dict,
        description="ranking: name of each predicted action and where it is read",
    )
    seed: int = Field(
        42, ge=0, lt=2**63, description="one seed for order, initial weights, dropout and negatives"
    )
    fit_to_data: bool = Field(
        False,
        description="choose the length, dropout and loss from the data when a run begins, where "
        "the recipe and its overrides leave them out; the run's recipe.yaml holds them",
    )
    model: ModelConfig = Field(
        default_factory=_all_defaults(ModelConfig), description="the network"
    )
    sampler: SamplerConfig = Field(
        default_factory=_all_defaults(SamplerConfig), description="how behaviours become batches"
    )
    split: Annotated[Split, BeforeValidator(_known_split_keys)] = Field(
        default_factory=Split, description="behaviours held out for validation and test"
    )
    repeat: Literal["exclude", "allow"] = Field(
        "exclude",
        description="exclude: an item the user has seen is never recommended, and a held-out item "
        "that was seen counts as missed; allow: nothing is filtered. Validation, evaluate, "
        "recommend and serving follow it",
    )
    window: Literal["latest", "stepped"] = Field(
        "latest",
        description="latest: the model sees exactly the latest sampler.max_len behaviours; "
        "stepped: the cut moves in steps of max_len / 8, so that a long history's prefix stays "
        "usable between requests. Validation, evaluate, recommend and serving follow it",
    )
    item_features: tuple[str, ...] = Field(
        (),
        description="item columns of the store that join the item's token: categories, several "
        "categories a row (averaged), or numbers (binned)",
    )
    item_vectors: tuple[str, ...] = Field(
        (),
        description="pretrained vectors of the store that join the item's token through a learned "
        "projection; the vectors themselves are not trained",
    )
    user_features: tuple[str, ...] = Field(
        (),
        description="user columns of the store that lead the sequence, a token each; kinds as for "
        "items",
    )
    context_features: tuple[str, ...] = Field(
        (),
        description="context columns of the store, such as device and surface, that join the token "
        "of their behaviour; each has a table, context.<name>",
    )
    number_bins: int = Field(
        16,
        ge=2,
        le=4096,
        description="bins of a numeric feature, learned from the items (users) that occur in the "
        "training part",
    )
    number_scaling: Literal["quantile", "log"] = Field(
        "quantile",
        description="quantile: bins with about as many items (users) each; log: bins equally wide "
        "on the scale of log(1 + x), within two deviations of its mean",
    )
    loss: LossConfig = Field(default_factory=_all_defaults(LossConfig), description="the objective")
    optimizer: OptimizerConfig = Field(
        default_factory=_all_defaults(OptimizerConfig),
        description="dense optimiser and learning-rate schedule",
    )
    tables: TablesConfig = Field(
        default_factory=_all_defaults(TablesConfig), description="embedding rows"
    )
    train: TrainConfig = Field(
        default_factory=_all_defaults(TrainConfig), description="length, evaluation, checkpoints"
    )

    @model_validator(mode="after")
    def _task_fits_loss(self) -> "Recipe":
        if self.task == "ranking" and not self.tasks:
            raise ValueError(
                "task 'ranking' needs tasks: name at least one action, for example "
                "tasks.click.column=is_click"
            )
        if self.task == "ranking" and self.loss.kind != "bce":
            raise ValueError("task 'ranking' predicts actions, so its loss.kind must be bce")
        if self.tables.replicas == "averaged" and "adamw" in self.tables.optimizers():
            raise ValueError(
                "tables.optimizer 'adamw' updates every row at every step, so its replicas cannot "
                "be averaged; use replicas=exact"
            )
        if self.task == "retrieval" and self.tasks:
            raise ValueError("tasks are for task 'ranking'; a retrieval recipe has none")
        return self

    @model_validator(mode="after")
    def _tables_are_there(self) -> "Recipe":
        known = self.table_names()
        for name in self.tables.by_name:
            if name not in known:
                raise ValueError(
                    f"tables.by_name has '{name}', but no table has this name"
                    f"{did_you_mean(name, known)}"
                )
        dim = self.tables.dim_of("item", self.model.dim)
        if self.task == "retrieval" and dim != self.model.dim:
            raise ValueError(
                f"retrieval compares what the model computes with the rows of table 'item', so "
                f"they have one width: leave out its dim {dim}, or make it model.dim "
                f"{self.model.dim}"
            )
        return self

    def table_names(self) -> list[str]:
        """Return the names of the embedding tables."""
        items = [f"item.{name}" for name in self.item_features]
        users = [f"user.{name}" for name in self.user_features]
        return ["item", *items, *users, *(f"context.{name}" for name in self.context_features)]


def trained_digest(recipe: Recipe) -> str:
    """Return the digest of everything that decides the numbers a run computes.

    Bookkeeping (names, places, how often to save) stays out. So does the length of a run, unless
    its learning rate depends on it: a run may be lengthened and ends where the long run ends.
    """
    content = recipe.model_dump(mode="json", exclude={"name", "data"})
    bookkeeping = ["checkpoint_every", "keep_last", "log_every", "tensorboard", "rank_timeout"]
    bookkeeping += ["micro_batches", "buffers_ahead", "cluster", "loggers", "checkpoint_seconds"]
    bookkeeping += ["activation_checkpointing"]
    # Where and how a step is computed does not matter: what digests said before there was a choice.
    content["train"] |= {"threads": None, "device": "cpu"}
    content["sampler"] |= {"balance": "none", "cost_linear": 1.0, "cost_quadratic": 0.0}
    if recipe.train.schedule not in ("semi_async", "six_stage"):
        bookkeeping += ["staleness", "synchronous_steps"]
        content["train"]["schedule"] = "synchronous"  # exact schedules equal the plain loop
    if recipe.tables.replicas == "exact":
        bookkeeping.append("mesh")
    if recipe.optimizer.decay == "constant":
        bookkeeping += ["epochs", "max_steps", "patience"]
    for key in bookkeeping:
        content["train"].pop(key)
    about_places = ["directory", "cache_bytes"]
    if recipe.tables.tier != "hashed":  # memory and disk hold the same rows
        about_places += ["tier", "admit_after", "max_rows", "evict"]
    for key in about_places:
        content["tables"].pop(key)
    content["tables"]["rule"] = content["tables"].pop("optimizer")  # the name it had before
    content["tables"]["by_name"] = _deciding_settings(recipe)
    if recipe.split.by == "last":
        for key in ("by", "validation_from", "test_from"):
            content["split"].pop(key)
    _leave_out_younger_defaults(content)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _deciding_settings(recipe: Recipe) -> dict[str, Any]:
    """Return what tables have of their own and decides numbers; memory and disk are the same."""
    found = {}
    for name, each in recipe.tables.by_name.items():
        own = each.model_dump(mode="json", exclude_none=True, exclude={"cache_bytes"})
        if recipe.tables.of_table(name).tier != "hashed":
            for key in ("tier", "admit_after", "max_rows", "evict"):
                own.pop(key, None)
            own |= {"tier": "memory"} if recipe.tables.tier == "hashed" else {}
        if own:
            found[name] = own
    return found


def network_digest(recipe: Recipe) -> str:
    """Return the digest of what decides the shapes and meaning of a model's weights.

    A checkpoint fits a recipe whose network digest is the same.
    """
    parts = {"task", "tasks", "model", "item_features", "user_features", "number_bins"}
    parts |= {"number_scaling", "item_vectors", "context_features"}
    content = recipe.model_dump(mode="json", include=parts)
    _leave_out_younger_defaults(content)
    content["rule"] = recipe.tables.optimizer  # the name it had when digests began
    own = {
        name: each.model_dump(include={"dim", "optimizer"}, exclude_none=True)
        for name, each in recipe.tables.by_name.items()
    }
    if any(own.values()):
        content["tables"] = own
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _leave_out_younger_defaults(content: dict[str, Any]) -> None:
    """Keep the digests that recipes had before these keys: their defaults add nothing."""
    for name, default in YOUNGER_KEYS.items():
        section, _, key = name.rpartition(".")
        part = content.get(section, {}) if section else content
        if key in part and part[key] == default:
            part.pop(key)
