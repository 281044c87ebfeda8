"""Cornac's SASRec takes part in the contest.

Touch it when Cornac changes `cornac.models.SASRec` or its sequential data set.

Each user's training part is one session: Cornac then learns every next item of the whole log. Its
fit has no hook for an epoch, so the iterator that fit asks for batches carries one.
"""

from __future__ import annotations

import importlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.arena.peers.contest_io import (
    Contest,
    Job,
    copy_state,
    say,
    time_single,
    users_to_time,
)
from benchmarks.arena.peers.contest_split import TEST, VALIDATION, Split

PACKAGES = ("cornac", "torch", "numpy", "scipy")


class TrainingEnds(Exception):
    """Leaves Cornac's fit between two epochs."""


def build_dataset(split: Split) -> Any:
    """Return the training part, with Cornac's item indices equal to our item rows."""
    from cornac.data import SequentialDataset

    rows = split.rows(VALIDATION)
    users, items = split.users_N[rows].tolist(), split.items_N[rows].tolist()
    behaviours = [(users[n], users[n], items[n], n) for n in range(len(rows))]
    return SequentialDataset.build(
        data=behaviours,
        fmt="USIT",
        global_uid_map=OrderedDict(),
        global_sid_map=OrderedDict(),
        global_iid_map=OrderedDict((row, row) for row in range(split.num_items)),
        seed=None,
    )


def scorer(model: Any, split: Split, question: str) -> Callable[[np.ndarray], np.ndarray]:
    """Return what scores the whole catalogue for a batch of users."""
    import torch

    def score(users_B: np.ndarray) -> np.ndarray:
        items_BL, _ = split.padded(users_B, question, model.max_len, pad=model.pad_idx)
        model.model.eval()
        scores = model.model.predict(None, torch.from_numpy(items_BL))
        return scores.reshape(len(users_B), split.num_items)

    return score


def watched(batches: Callable[..., Iterator[Any]], contest: Contest, model: Any) -> Any:
    """Return Cornac's batch iterator, which now judges the epoch after its last batch."""

    def iterate(*arguments: Any, **named: Any) -> Iterator[Any]:
        contest.clock.start()
        for batch in batches(*arguments, **named):
            yield batch
            if contest.cuts_epoch():
                break
        contest.clock.stop()
        top_UK = contest.split.answer(VALIDATION, 10, scorer(model, contest.split, VALIDATION))
        if contest.epoch_done(top_UK, lambda: copy_state(model.model)):
            raise TrainingEnds

    return iterate


def train(contest: Contest, model: Any, dataset: Any) -> None:
    """Fit with Cornac's own loop, and leave the model with the weights of the best epoch."""
    module: Any = importlib.import_module("cornac.models.sasrec.recom_sasrec")
    original = module.session_seq_iter
    module.session_seq_iter = watched(original, contest, model)
    try:
        model.fit(dataset)
    except TrainingEnds:
        pass
    finally:
        module.session_seq_iter = original
    if contest.epochs == 0:
        raise RuntimeError("Cornac's SASRec asked for its batches in an unknown way")
    model.model.load_state_dict(contest.best_weights)
    model.model.eval()


def time_requests(model: Any, split: Split) -> dict[str, float]:
    """Time single requests through Cornac's rank, which scores and sorts the unseen items."""
    users = users_to_time(split)

    def recommend_one(user: int) -> None:
        history = split.history(user, TEST)
        open_I = split.trained_I.copy()
        open_I[history] = False
        candidates = np.flatnonzero(open_I)
        model.rank(user, item_indices=candidates, k=10, history_items=history.tolist())

    return time_single(recommend_one, users)


def main() -> None:
    """Train, judge every epoch, answer the test question once."""
    job = Job.read()
    split = Split(job.split)
    warnings.filterwarnings("ignore")
    import torch
    from cornac.models import SASRec

    torch.set_num_threads(job.threads)
    contest = Contest(job, split)
    model = SASRec(n_epochs=job.epochs, device="cpu", verbose=False, seed=job.seed, **job.settings)
    say(f"Cornac SASRec: training with {job.settings}")
    train(contest, model, build_dataset(split))
    top_UK = split.answer(TEST, job.k, scorer(model, split, TEST))
    contest.finish(top_UK, time_requests(model, split), PACKAGES)


if __name__ == "__main__":
    main()
