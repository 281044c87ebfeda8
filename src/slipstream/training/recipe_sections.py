"""The sections of a recipe: loss, optimiser, tables, length of a run; typed, unknown keys refused.

The descriptions of the fields are their documentation and what `--help` shows. Touch this when a
section gets a key; a key that gets another name goes into its section's `renamed`. A key that must
not change the digests of earlier runs is listed in `recipe.py`.
"""

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from slipstream.config import translate_renamed

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


RowOptimizerName = Literal["rowwise_adagrad", "rowwise_adam", "adamw"]
Tier = Literal["memory", "disk", "hashed"]


class TableSettings(Section):
    """Where one table differs from the others; what is not given is as in `tables`."""

    dim: int | None = Field(
        None, ge=1, description="width of its rows, projected to the model's; default: model.dim"
    )
    optimizer: RowOptimizerName | None = Field(None, description="as tables.optimizer")
    lr: Positive | None = Field(None, description="as tables.lr")
    init_scale: Positive | None = Field(None, description="as tables.init_scale")
    tier: Tier | None = Field(None, description="as tables.tier")
    cache_bytes: int | None = Field(None, ge=1 << 16, description="as tables.cache_bytes")
    admit_after: int | None = Field(None, ge=1, le=255, description="as tables.admit_after")
    max_rows: int | None = Field(None, ge=1, description="as tables.max_rows")
    evict: Literal["lru", "lfu"] | None = Field(None, description="as tables.evict")


class TablesConfig(Section):
    """How embedding rows begin and are updated."""

    renamed: ClassVar[dict[str, str]] = {"rule": "optimizer"}

    optimizer: RowOptimizerName = Field(
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
    tier: Tier = Field(
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
    by_name: dict[str, TableSettings] = Field(
        default_factory=dict,
        description="tables that differ, by name (item, item.<feature>, user.<feature>): their "
        "dim, optimizer, lr, init_scale, tier, cache_bytes, admit_after, max_rows, evict; for "
        "example {item.tag: {dim: 16, optimizer: rowwise_adagrad}}",
    )

    def of_table(self, name: str) -> "TablesConfig":
        """Return the settings of one table, its own where it has some."""
        given = self.by_name.get(name)
        own = {} if given is None else given.model_dump(exclude={"dim"}, exclude_none=True)
        return self.model_copy(update={**own, "by_name": {}})

    def dim_of(self, name: str, default: int) -> int:
        """Return the width of one table's rows."""
        own = self.by_name.get(name)
        return default if own is None or own.dim is None else own.dim

    def optimizers(self) -> set[str]:
        """Return the names of all tables' optimizers."""
        own = {each.optimizer for each in self.by_name.values() if each.optimizer is not None}
        return {self.optimizer, *own}

    def without_files(self) -> "TablesConfig":
        """Return the same tables in memory, where they are in files; hashed ones stay hashed."""
        by_name = {
            name: each.model_copy(update={"tier": "memory"}) if each.tier == "disk" else each
            for name, each in self.by_name.items()
        }
        tier = "memory" if self.tier == "disk" else self.tier
        return self.model_copy(update={"tier": tier, "directory": None, "by_name": by_name})


def _read_interval(value: Any) -> Any:
    """Return epochs as a number and steps as `500 steps`, from what a recipe says."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    words = re.fullmatch(r"(\d{1,12})(?:\s+(step|epoch)s?)?", str(value).strip())
    number = int(words[1]) if words else 0
    if words is None or (words[2] and not number):
        raise ValueError(
            f"'{value}' is no interval; write a number of epochs, '500 steps' or '2 epochs'"
        )
    return f"{number} steps" if words[2] == "step" else number


class TrainConfig(Section):
    """How long, how often, and what is kept."""

    epochs: int = Field(101, ge=1, description="passes over the training part of the store")
    max_steps: int | None = Field(
        None, ge=1, description="stop after exactly this many steps, whatever the epochs say"
    )
    evaluate_every: Annotated[int | str, BeforeValidator(_read_interval)] = Field(
        1,
        description="evaluate the held-out validation behaviour every so many epochs, or in words: "
        "'500 steps', '2 epochs'; 0 never. The last step is always evaluated",
    )
    metric: str | None = Field(
        None,
        description="validation figure to maximise, names joined by +; default HR@10+NDCG@10, or "
        "the AUC of all ranking tasks",
    )
    patience: int | None = Field(
        None, ge=1, description="stop after so many evaluations in a row without a better figure"
    )
    checkpoint_seconds: Positive | None = Field(
        300.0,
        description="seconds between checkpoints (one is also written after each evaluation and at "
        "the end); null: not by time",
    )
    checkpoint_every: int | None = Field(
        None, ge=1, description="steps between checkpoints, besides those by time"
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
    loggers: tuple[Literal["wandb", "mlflow"], ...] = Field(
        (),
        description="where the figures go besides: Weights & Biases, MLflow; each needs its extra "
        "(pip install 'slipstream[wandb]') and follows its own environment variables",
    )
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
    buffers_ahead: Annotated[int, Field(ge=1, le=16)] = Field(
        1,
        description="nested and dual_buffer: steps whose rows are retrieved before their turn, all "
        "at a time from a table on disk; more where it answers late, at the memory of their rows",
    )
    precision: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="how linear layers multiply while training: bf16 halves their operands; "
        "weights, rows, attention and losses stay in fp32, and so do evaluation and serving",
    )
    activation_checkpointing: bool = Field(
        False,
        description="keep only the input of each block and compute the block again in the backward "
        "pass: less memory, the same bits",
    )
    accumulate: Annotated[int, Field(ge=1, le=4096)] = Field(
        1,
        description="batches of the sampler in one optimiser step, computed one after the other; "
        "the step is that of one batch as large as all of them",
    )
    cluster: bool = Field(
        True,
        description="cut a batch so that its micro-batches share keys (frozen_window and nested)",
    )

    @property
    def evaluation_steps(self) -> int | None:
        """Steps between two evaluations; None where they are counted in epochs."""
        every = self.evaluate_every
        return int(every.split()[0]) if isinstance(every, str) else None
