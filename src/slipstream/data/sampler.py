"""Which behaviours train together: a seeded order of windows of users per epoch, in batches.

Everything the sampler does is a function of (seed, epoch, window), so its state is two numbers.
`batch_size` and `token_budget` describe the *global* batch; `rank` takes its part of it. All ranks
walk the same order and take the same number of steps. Touch this when batches are chosen in another
way; `windows.py` makes them, `loader.py` makes them ahead.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from slipstream.data.balance import Balance, Cost, share_batch
from slipstream.data.batch import JaggedBatch
from slipstream.data.splits import Split, Which
from slipstream.data.store import SequenceStore
from slipstream.data.windows import Task, cut_windows
from slipstream.errors import SlipstreamError

__all__ = ["SamplerConfig", "Split", "TrainingSampler", "evaluation_batches"]


class SamplerConfig(BaseModel):
    """The `sampler` section of a recipe."""

    model_config = ConfigDict(extra="forbid")

    max_len: int = Field(
        200,
        ge=1,
        description="tokens of a window at most: the most recent ones of the training part",
    )
    windows: int = Field(
        1,
        ge=1,
        description="windows of a user per epoch at most: the latest, the one before it, and so "
        "on. They lie end to end, so every behaviour is a target once and the context does not "
        "overlap",
    )
    batch_size: int | None = Field(
        None,
        ge=1,
        description="windows (users, with one window each) per global batch (128 unless "
        "token_budget is given)",
    )
    token_budget: int | None = Field(
        None,
        ge=1,
        description="tokens per global batch; a window longer than it is a batch of its own",
    )
    stochastic_length: float | None = Field(
        None,
        gt=1,
        le=2,
        description="HSTU's alpha: long windows are cut to max_len^(alpha/2) at random",
    )
    min_len: int = Field(
        1, ge=1, description="users whose window has fewer tokens are left out of training"
    )
    balance: Balance = Field(
        "auto",
        description="how a global batch is shared over ranks: by predicted cost (auto, lpt, "
        "karmarkar_karp), or none: in turn; it changes who computes a sample, not the result",
    )
    cost_linear: float | None = Field(
        None,
        ge=0,
        description="predicted cost of a token; default: the model's FLOPs, unless cost_quadratic "
        "is given",
    )
    cost_quadratic: float | None = Field(
        None,
        ge=0,
        description="predicted cost of a pair of tokens (a length-n window costs this times n "
        "squared); default: the model's FLOPs, unless cost_linear is given",
    )

    @model_validator(mode="after")
    def _one_size(self) -> "SamplerConfig":
        if self.batch_size is not None and self.token_budget is not None:
            raise ValueError("give batch_size or token_budget, not both")
        if self.batch_size is None and self.token_budget is None:
            self.batch_size = 128
        return self

    def cost_or(self, default: Cost) -> Cost:
        """Return the predicted cost of a window that is given here, or the default."""
        if self.cost_linear is None and self.cost_quadratic is None:
            return default
        linear = 1.0 if self.cost_linear is None else self.cost_linear
        return Cost(linear, self.cost_quadratic or 0.0)


class TrainingSampler:
    """Endless batches over epochs.

    A retrieval window is `max_len` (input, next) pairs, a ranking window `max_len` behaviours.
    Window j of a user ends `j * max_len` tokens before the end of the training part. With
    `share_targets` every rank's part carries the targets of the whole global batch. `cost` is what
    ranks are balanced by, where the configuration gives no cost: by default a window's tokens.
    """

    def __init__(
        self,
        store: SequenceStore,
        config: SamplerConfig,
        *,
        seed: int,
        split: Split | None = None,
        rank: int = 0,
        world_size: int = 1,
        task: Task = "retrieval",
        share_targets: bool = False,
        cost: Cost | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is outside a world of {world_size}")
        self.store, self.config, self.seed, self.task = store, config, seed, task
        self.rank, self.world_size = rank, world_size
        self._share_targets, self._cost = share_targets, config.cost_or(cost or Cost())
        self.split = split or Split()
        self._ends_U = self.split.train_lengths(store)
        tokens_U = self._ends_U - (task == "retrieval")
        # The first tokens of a log may be too few for a window of their own.
        most = config.windows if config.min_len <= config.max_len else 0
        counts_U = np.clip((tokens_U - config.min_len) // config.max_len + 1, 0, most)
        self._users = np.repeat(np.arange(counts_U.size), counts_U)  # of each window
        starts = np.cumsum(counts_U) - counts_U
        self._numbers = np.arange(self._users.size) - np.repeat(starts, counts_U)
        self._ends = tokens_U[self._users] - self._numbers * config.max_len  # token places
        self._lengths = np.minimum(self._ends, config.max_len)
        if self._users.size == 0:
            raise SlipstreamError(
                f"no user has enough behaviours to train on (at least {config.min_len} after "
                "holding some out)"
            )
        self.epoch, self._step = 0, 0
        self._plan = self._plan_epoch(0)
        self.steps_per_epoch = len(self._plan.starts)

    def next_batch(self) -> JaggedBatch:
        """Return this rank's part of the next global batch; the next epoch follows by itself."""
        if self.at_epoch_end:
            self.epoch, self._step = self.epoch + 1, 0
            self._plan = self._plan_epoch(self.epoch)
        batch = self._assemble(self._plan, self._step)
        self._step += 1
        return batch

    def epoch_batches(self) -> Iterator[JaggedBatch]:
        """Yield the batches left in this epoch, or all of the next one when none is left."""
        if self.at_epoch_end:
            self.epoch, self._step = self.epoch + 1, 0
            self._plan = self._plan_epoch(self.epoch)
        while not self.at_epoch_end:
            yield self.next_batch()

    @property
    def at_epoch_end(self) -> bool:
        """Whether the last batch was its epoch's last."""
        return self._step == len(self._plan.starts)

    def state_dict(self) -> dict[str, Any]:
        """Return the position (two numbers) and what a restart must have in common with it."""
        return {"epoch": self.epoch, "step": self._step, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the sample after that of `state`, on any number of ranks.

        Where the store has grown since, an epoch over all of it begins.
        """
        grown = state.get("store") in self.store.ancestors
        if grown:
            state = state | {"store": self.store.digest}
            state |= {"epoch": int(state["epoch"]) + (int(state["step"]) > 0), "step": 0}
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise SlipstreamError(
                    f"cannot go on where the sampler stopped: its {name} was {state.get(name)!r}, "
                    f"now it is {value!r}; "
                    "use the same data and sampler settings, or start a new run"
                )
        self.epoch, self._step = int(state["epoch"]), int(state["step"])
        self._plan = self._plan_epoch(self.epoch)

    def _identity(self) -> dict[str, Any]:
        elsewhere = {"balance", "cost_linear", "cost_quadratic"}
        if self.config.windows == 1:  # as before there could be more
            elsewhere.add("windows")
        same_batches = self.config.model_dump(exclude=elsewhere)
        return {
            "seed": self.seed,
            "task": self.task,
            "store": self.store.digest,
            "held_out": self.split.identity(),
            **same_batches,
        }

    def _plan_epoch(self, epoch: int) -> "_Plan":
        order = np.random.default_rng([_unsigned(self.seed), epoch, 0]).permutation(
            self._users.size
        )
        users, lengths = self._users[order], self._lengths[order]
        alpha = self.config.stochastic_length
        if alpha is not None:
            # A draw per user and window, in store order, whatever the order of the epoch.
            shape = (self._ends_U.size, self.config.windows)
            draws_UW = np.random.default_rng([_unsigned(self.seed), epoch, 1]).random(shape)
            draws = draws_UW[users, self._numbers[order]]
            lengths = stochastic_lengths(lengths, draws, self.config.max_len, alpha)
        if self.config.token_budget is not None:
            starts = _budget_starts(lengths, self.config.token_budget)
        else:
            starts = np.arange(0, users.size, self.config.batch_size)
        return _Plan(users, self._ends[order], lengths, starts)

    def _assemble(self, plan: "_Plan", step: int) -> JaggedBatch:
        begin = plan.starts[step]
        end = plan.starts[step + 1] if step + 1 < len(plan.starts) else plan.users.size
        mine = begin + share_batch(
            plan.lengths[begin:end],
            self.rank,
            self.world_size,
            balance=self.config.balance,
            cost=self._cost,
            by_tokens=self.config.token_budget is not None,
        )
        users_B, ends_B, lengths_B = plan.users[mine], plan.ends[mine], plan.lengths[mine]
        batch = cut_windows(
            self.store,
            users_B,
            ends_B - lengths_B,
            ends_B,
            self._ends_U[users_B],
            np.zeros_like(ends_B),
            self.task,
        )
        if self._share_targets:
            batch = replace(batch, global_targets_P=self._targets(plan, slice(begin, end)))
        return batch

    def _targets(self, plan: "_Plan", part: slice) -> torch.Tensor:
        """Return the next item of every token of a global batch, in its order."""
        lengths_B = plan.lengths[part]
        starts_B = self.store.offsets_U1[plan.users[part]] + plan.ends[part] + 1 - lengths_B
        before_B = np.cumsum(lengths_B) - lengths_B
        places_P = np.arange(lengths_B.sum()) + np.repeat(starts_B - before_B, lengths_B)
        return torch.from_numpy(self.store.items_N[places_P])


class _Plan:
    """One epoch: users in order, their windows, and where each global batch starts.

    A window is the `lengths` tokens before the place `ends` of the user's log.
    """

    def __init__(
        self, users: np.ndarray, ends: np.ndarray, lengths: np.ndarray, starts: np.ndarray
    ) -> None:
        self.users, self.ends, self.lengths, self.starts = users, ends, lengths, starts


def stochastic_lengths(
    lengths: np.ndarray, draws: np.ndarray, max_len: int, alpha: float
) -> np.ndarray:
    """Apply HSTU's stochastic length to windows of n tokens.

    A window of n > max_len^(alpha/2) tokens stays whole with probability max_len^alpha / n^2.
    Otherwise its most recent max_len^(alpha/2) tokens are taken, so that attention costs about
    max_len^alpha instead of n^2.
    """
    threshold = max(1, int(max_len ** (alpha / 2)))
    stays = draws * lengths.astype(np.float64) ** 2 < max_len**alpha
    return np.where((lengths > threshold) & ~stays, threshold, lengths)


def _budget_starts(lengths: np.ndarray, budget: int) -> np.ndarray:
    """Return the first sample of each batch; a batch ends before a window that does not fit."""
    ends = np.cumsum(lengths)
    starts, at = [], 0
    while at < lengths.size:
        starts.append(at)
        before = ends[at] - lengths[at]
        at = max(at + 1, int(np.searchsorted(ends, before + budget, side="right")))
    return np.array(starts, dtype=np.int64)


def _unsigned(seed: int) -> int:
    return seed & ((1 << 64) - 1)


def evaluation_batches(
    store: SequenceStore,
    split: Which,
    *,
    max_len: int,
    batch_size: int | None = None,
    token_budget: int | None = None,
    task: Task = "retrieval",
    holdout: Split | None = None,
    start: Callable[[int], int] | None = None,
) -> Iterator[JaggedBatch]:
    """Yield every user with held-out behaviours, in store order, up to the end of that part.

    A window begins at `start(n)` of the n behaviours before its end; unless given, it has the most
    recent `max_len` tokens. For retrieval each held-out behaviour has a window of its own, whose
    last token asks for it; for ranking the held-out behaviours are tokens themselves, at most
    `max_len / 2` of them in a window.
    """
    begins_U, ends_U = (holdout or Split()).held_out(store, split)
    most = 1 if task == "retrieval" else max(1, max_len // 2)
    users, asked_from, known = _pieces(begins_U, ends_U, most)
    if not users.size:
        return
    ends = known - (task == "retrieval")
    lengths, inverse = np.unique(ends, return_inverse=True)
    first = start or (lambda behaviours: max(0, behaviours - max_len))
    begins = np.array([first(int(length)) for length in lengths], dtype=np.int64)[inverse]
    if token_budget is not None:
        starts = _budget_starts(ends - begins, token_budget)
    else:
        starts = np.arange(0, users.size, batch_size or 128)
    for begin, end in zip(starts, [*starts[1:], users.size], strict=True):
        part = slice(begin, end)
        yield cut_windows(
            store,
            users[part],
            begins[part],
            ends[part],
            known[part],
            asked_from[part],
            task,
        )


def _pieces(
    begins_U: np.ndarray, ends_U: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut places `begins_U[u]:ends_U[u]` into pieces of at most `most`: user, begin, end."""
    pieces_U = -(-(ends_U - begins_U) // most)
    users = np.repeat(np.arange(begins_U.size), pieces_U)
    place = np.arange(users.size) - np.repeat(np.cumsum(pieces_U) - pieces_U, pieces_U)
    begins = begins_U[users] + place * most
    return users, begins, np.minimum(begins + most, ends_U[users])
