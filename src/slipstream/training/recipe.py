"""The recipe: everything that decides what a run computes, typed, with unknown keys refused.

A run is a function of (recipe, store). The descriptions of the fields are their documentation and
what `--help` shows. Touch this when a run can be configured in another way; a key that gets another
name goes into its section's `renamed`.
"""

import hashlib
import json
from collections.abc import Callable
from datetime import date
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from slipstream.config import translate_renamed
from slipstream.data.sampler import SamplerConfig
from slipstream.data.splits import Split
from slipstream.errors import did_you_mean
from slipstream.models.model_config import ModelConfig

Part = TypeVar("Part", bound=BaseModel)


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


Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of a recipe: no unknown keys, no changes after reading.

    `renamed` maps keys of earlier recipes, runs and bundles to what they are called now.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    renamed: ClassVar[dict[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _translate_renamed(cls, values: Any) -> Any:
        return translate_renamed(cls, values)


class RankingTask(Section):
    """One action the ranking model predicts."""

    column: str = Field(description="action column of the store this task reads")
    threshold: float = Field(
        0.5, description="the action happened where the column is at least this"
    )
    weight: Positive = Field(1.0, description="weight of this task in the summed loss")


class LossConfig(Section):
    """What the model is asked to get right."""

    kind: Literal[
        "sampled_softmax", "sequence_softmax", "shared_softmax", "full_softmax", "bce"
    ] = Field(
        "sampled_softmax",
        description="sampled_softmax: own negatives per token; sequence_softmax: one set of "
        "negatives per sequence; "
        "shared_softmax: one set per step; full_softmax: the whole catalogue; "
        "bce: binary, with negatives for retrieval, per action for ranking",
    )
    negatives: int = Field(
        128,
        ge=1,
        description="negatives per set: per token, per sequence or per step, as kind says",
    )
    sampling: Literal["uniform", "popularity", "in_batch", "mixed"] = Field(
        "uniform",
        description="where negatives come from: uniform or popularity over the catalogue; "
        "in_batch: targets of the global batch, "
        "whose rows are mostly looked up anyway; mixed: a share from the batch, the rest uniform",
    )
    popularity_power: float = Field(
        1.0,
        ge=0,
        description="popularity sampling draws an item by its training count to this power",
    )
    mixed_share: float = Field(
        0.5, gt=0, lt=1, description="mixed sampling: share of the negatives drawn from the batch"
    )
    log_q: bool = Field(
        True,
        description="correct the logits by the logarithm of how likely each item was drawn (not "
        "for uniform)",
    )
    share: int = Field(
        1,
        ge=1,
        le=64,
        description="k: tokens form groups of k (by a seeded permutation) and each scores the "
        "negatives of all k, so that "
        "k x negatives logits cost the lookups of one set (sampled_softmax)",
    )
    share_within: Literal["sequence", "batch"] = Field(
        "sequence",
        description="whose tokens form a group: those of one sequence, so that samples stay "
        "independent of each other, "
        "or any of the batch, which several ranks and schedules that cut batches refuse",
    )
    share_by: Literal["rows", "logits"] = Field(
        "rows",
        description="rows: a token scores the shared negatives itself; logits: it takes over its "
        "neighbours' own logits, "
        "an ablation that is no softmax of the token",
    )
    precision: Literal["fp32", "fp16"] = Field(
        "fp32",
        description="fp16: rows read as negatives travel between ranks and are scored in 16 bits "
        "(and their gradients travel so); "
        "rows of the history and of targets stay exact",
    )
    fetch: Literal["whole", "segmented"] = Field(
        "whole",
        description="whole: all distinct negatives of a step at once; segmented: in segments with "
        "the next one on its way while "
        "one is scored, so that memory does not grow with tokens x negatives",
    )
    segment_bytes: int = Field(
        1 << 23, ge=1 << 12, description="segmented: bytes of rows one of the two buffers may hold"
    )
    temperature: Positive = Field(0.05, description="logits are divided by it")
    normalize: bool = Field(
        True,
        description="compare directions: L2-normalise hidden states and item rows before the dot "
        "product",
    )

    @property
    def draws_from_batch(self) -> bool:
        """Whether negatives are drawn from the targets of the global batch."""
        return self.sampling in ("in_batch", "mixed") and self.kind != "full_softmax"

    @model_validator(mode="after")
    def _options_fit(self) -> "LossConfig":
        if self.share > 1 and self.kind != "sampled_softmax":
            raise ValueError(
                f"loss.share lets tokens score each other's own sets, but kind {self.kind} has no "
                "set per token"
            )
        if (self.precision == "fp16" or self.fetch == "segmented") and self.kind not in (
            "sampled_softmax",
            "sequence_softmax",
        ):
            raise ValueError(
                "loss.precision=fp16 and loss.fetch=segmented are for sampled_softmax and "
                f"sequence_softmax, not for {self.kind}"
            )
        if self.share_by == "logits" and (self.precision == "fp16" or self.fetch == "segmented"):
            raise ValueError(
                "loss.share_by=logits is an ablation for whole fetches in fp32; use share_by=rows"
            )
        return self


class OptimizerConfig(Section):
    """AdamW for the dense part; the schedule scales the tables' learning rate too."""

    lr: Positive = Field(1e-3, description="learning rate of the dense parameters")
    betas: tuple[Fraction, Fraction] = Field(
        (0.9, 0.98), description="AdamW's decay rates of the two moments"
    )
    eps: Positive = Field(1e-8, description="AdamW's guard against division by zero")
    weight_decay: float = Field(
        0.0, ge=0, description="decoupled weight decay of the dense parameters"
    )
    clip_norm: Positive | None = Field(
        None,
        description="clip the global norm of the dense gradients (rows of tables are not clipped)",
    )
    warmup_steps: int = Field(
        0, ge=0, description="steps over which the learning rates rise linearly from zero"
    )
    decay: Literal["constant", "cosine"] = Field(
        "constant", description="what the learning rates do after the warm-up"
    )
    final_fraction: float = Field(
        0.0, ge=0, le=1, description="share of the learning rate left at the end of a cosine decay"
    )


class TablesConfig(Section):
    """How embedding rows begin and are updated."""

    renamed: ClassVar[dict[str, str]] = {"rule": "optimizer"}

    optimizer: Literal["rowwise_adagrad", "rowwise_adam", "adamw"] = Field(
        "rowwise_adam",
        description="rowwise_* update only the rows of the batch; adamw updates every row at every "
        "step (small tables)",
    )
    lr: Positive = Field(
        1e-3, description="learning rate of the rows, scaled by the same schedule as the dense one"
    )
    betas: tuple[Fraction, Fraction] = Field(
        (0.9, 0.98), description="decay rates of the two moments (the adam optimizers)"
    )
    eps: Positive = Field(1e-8, description="guard against division by zero")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay (adamw only)")
    init_scale: Positive = Field(
        0.035, description="rows start uniformly between minus and plus this"
    )
    tier: Literal["memory", "disk", "hashed"] = Field(
        "memory",
        description="where rows live: memory; disk: files with a cache of rows; hashed: rows only "
        "for ids that are trained",
    )
    directory: str | None = Field(
        None,
        description="where the files of tier disk (or of a hashed table that outgrows memory) lie",
    )
    cache_bytes: int = Field(
        1 << 30,
        ge=1 << 16,
        description="memory for the rows of one table, where they live in files",
    )
    admit_after: int = Field(
        1,
        ge=1,
        le=255,
        description="hashed: training steps an id must be part of before it gets a row",
    )
    max_rows: int | None = Field(
        None,
        ge=1,
        description="hashed: rows of a table at most, shared evenly by the ranks that hold it; the "
        "least used make room",
    )
    evict: Literal["lru", "lfu"] = Field(
        "lru", description="hashed: which rows are least used: longest ago, or least often"
    )
    transport: Literal["exact", "fp16", "bf16"] = Field(
        "exact",
        description="how rows and gradients travel between ranks; 16 bits halve the bytes and "
        "round",
    )
    replicas: Literal["exact", "averaged"] = Field(
        "exact",
        description="mesh with several replicas: sum gradients before each update (replicas stay "
        "the same bits), or let each "
        "update by its own and average the rows now and then (another trajectory)",
    )
    average_every: int = Field(
        1, ge=1, description="steps between two averages (replicas averaged only)"
    )


class TrainConfig(Section):
    """How long, how often, and what is kept."""

    epochs: int = Field(101, ge=1, description="passes over the training part of the store")
    max_steps: int | None = Field(
        None, ge=1, description="stop after exactly this many steps, whatever the epochs say"
    )
    evaluate_every: int = Field(
        1,
        ge=0,
        description="evaluate the held-out validation behaviour every so many epochs; 0 never",
    )
    metric: str | None = Field(
        None,
        description="validation figure to maximise, names joined by +; default HR@10+NDCG@10, or "
        "the AUC of all ranking tasks",
    )
    patience: int | None = Field(
        None, ge=1, description="stop after so many evaluations in a row without a better figure"
    )
    checkpoint_every: int = Field(
        200,
        ge=1,
        description="steps between checkpoints (one is also written after each evaluation)",
    )
    keep_last: int = Field(2, ge=1, description="checkpoints kept besides the best one")
    threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads; default: torch's number, or what is free of it. Bitwise "
        "repetition needs the same count; a resumed run keeps its own",
    )
    log_every: int = Field(10, ge=1, description="steps between lines of metrics.jsonl")
    tensorboard: bool = Field(True, description="write TensorBoard events too")
    mesh: Annotated[str, Field(pattern=r"^(auto|[1-9]\d{0,5}x[1-9]\d{0,5})$")] = Field(
        "auto",
        description="replicas x shards of the ranks torchrun starts, for example 2x4; auto: one "
        "replica over all ranks",
    )
    rank_timeout: Positive = Field(
        300.0, description="seconds a rank may keep the others waiting before the job ends"
    )
    device: Annotated[str, Field(pattern=r"^(auto|cpu|[a-z]+(:\d{1,3})?)$")] = Field(
        "cpu",
        description="where the dense part computes: cpu, cuda, npu, or auto (an accelerator where "
        "there is one); "
        "tables stay in host memory",
    )
    schedule: Literal[
        "auto", "synchronous", "dual_buffer", "frozen_window", "nested", "semi_async", "six_stage"
    ] = Field(
        "auto",
        description="how lookups, exchange and compute overlap; auto: the fastest exact one, tried "
        "out in the first steps; synchronous: not at all, the plain loop; semi_async and six_stage "
        "read older rows",
    )
    staleness: Annotated[int, Field(ge=1, le=16)] = Field(
        1,
        description="semi_async and six_stage: the rows of a step have not seen the updates of so "
        "many steps before it",
    )
    synchronous_steps: int = Field(
        0,
        ge=0,
        description="semi_async and six_stage: so many steps at the start of a run see every "
        "update; staleness begins then",
    )
    micro_batches: Annotated[int, Field(ge=1, le=4096)] | Literal["auto"] = Field(
        8,
        description="parts of a batch under frozen_window and nested; auto chooses from the first "
        "steps' times (not repeatable)",
    )
    cluster: bool = Field(
        True,
        description="cut a batch so that its micro-batches share keys (frozen_window and nested)",
    )


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
    user_features: tuple[str, ...] = Field(
        (),
        description="user columns of the store that lead the sequence, a token each; kinds as for "
        "items",
    )
    number_bins: int = Field(
        16,
        ge=2,
        le=4096,
        description="bins of a numeric feature, each with about as many of the items (users) that "
        "occur in the training part",
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
        if self.tables.replicas == "averaged" and self.tables.optimizer == "adamw":
            raise ValueError(
                "tables.optimizer 'adamw' updates every row at every step, so its replicas cannot "
                "be averaged; use replicas=exact"
            )
        if self.task == "retrieval" and self.tasks:
            raise ValueError("tasks are for task 'ranking'; a retrieval recipe has none")
        return self


def trained_digest(recipe: Recipe) -> str:
    """Return the digest of everything that decides the numbers a run computes.

    Bookkeeping (names, places, how often to save) stays out. So does the length of a run, unless
    its learning rate depends on it: a run may be lengthened and ends where the long run ends.
    """
    content = recipe.model_dump(mode="json", exclude={"name", "data"})
    bookkeeping = ["checkpoint_every", "keep_last", "log_every", "tensorboard", "rank_timeout"]
    bookkeeping += ["micro_batches", "cluster"]
    # Where and how a step is computed does not matter: what digests said before there was a choice.
    content["train"] |= {"threads": None, "device": "cpu"}
    content["sampler"] |= {"balance": "none", "cost_linear": 1.0, "cost_quadratic": 0.0}
    if recipe.train.schedule not in ("semi_async", "six_stage"):
        bookkeeping += ["staleness", "synchronous_steps"]
        content["train"]["schedule"] = "synchronous"  # exact schedules equal the plain loop
    if recipe.tables.replicas == "exact":
        bookkeeping.append("mesh")
    elif recipe.tables.average_every > 1:  # a checkpoint averages the replicas too
        bookkeeping.remove("checkpoint_every")
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
    for key in ("repeat", "window"):  # younger than the digest: the default adds nothing to it
        if content[key] == Recipe.model_fields[key].default:
            content.pop(key)
    if content["sampler"]["windows"] == 1:
        content["sampler"].pop("windows")
    if recipe.split.by == "last":
        for key in ("by", "validation_from", "test_from"):
            content["split"].pop(key)
    _leave_out_default_bins(content)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def network_digest(recipe: Recipe) -> str:
    """Return the digest of what decides the shapes and meaning of a model's weights.

    A checkpoint fits a recipe whose network digest is the same.
    """
    parts = {"task", "tasks", "model", "item_features", "user_features", "number_bins"}
    content = recipe.model_dump(mode="json", include=parts)
    _leave_out_default_bins(content)
    content["rule"] = recipe.tables.optimizer  # the name it had when digests began
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _leave_out_default_bins(content: dict[str, Any]) -> None:
    """Keep the digests that recipes had before numbers could be features."""
    if content["number_bins"] == Recipe.model_fields["number_bins"].default:
        content.pop("number_bins")
