"""Slipstream's shipped recipes take part in the contest, through the public Python API.

Touch it when `ss.train`, its callbacks or `Run.recommend` change. Unlike the peers it reads a store
beside the split file; both must hold out the same behaviours.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arena.peers.contest_io import Contest, Job, say, time_single, users_to_time
from benchmarks.arena.peers.contest_metrics import JUDGED_AT, list_metrics
from benchmarks.arena.peers.contest_split import TEST, VALIDATION, Split
from slipstream import History, api
from slipstream.training import Callback, TrainingSession, recommend

PACKAGES = ("slipstream", "torch", "numpy", "polars", "pyarrow")
COMPARED = 20  # users whose timed answer is compared with their list


class Watcher(Callback):
    """A callback that counts training time, records validations and keeps the budget.

    A line of metrics comes after every step (`train.log_every=1`), so what passes between the last
    one and the checkpoint after a validation is no training.
    """

    def __init__(self, contest: Contest) -> None:
        self.contest = contest

    def on_start(self, session: TrainingSession) -> None:
        self.contest.clock.start()

    def on_log(self, session: TrainingSession, figures: dict[str, Any]) -> None:
        self.contest.clock.mark()

    def on_evaluation(
        self, session: TrainingSession, figures: dict[str, float], is_best: bool
    ) -> None:
        contest = self.contest
        contest.clock.stop_at_mark()
        kept = {f"{name}@{JUDGED_AT}": figures[f"{name}@{JUDGED_AT}"] for name in ("HR", "NDCG")}
        contest.record(session.epoch, kept, is_best)
        if contest.over_budget():
            session.stop()

    def on_checkpoint(self, session: TrainingSession, checkpoint: Path) -> None:
        self.contest.clock.start()

    def on_end(self, session: TrainingSession, status: str) -> None:
        self.contest.clock.stop_at_mark()
        reasons = {"finished": "epochs", "stopped early": "patience", "interrupted": "budget"}
        self.contest.stopped = reasons.get(status, status)


class Answers:
    """Asks a trained run the questions of the split."""

    def __init__(self, run: Any, split: Split, request_time: bool) -> None:
        self.run, self.split = run, split
        self.timed = request_time and split.timed
        self.asked = {q: split.asked_times(q, request_time) for q in (VALIDATION, TEST)}

    def lists(self, question: str, k: int) -> np.ndarray:
        """Return the k best trained, unseen item rows of every asker."""
        users_A = self.split.askers(question)
        top_UK = np.full((self.split.num_users, k), -1, dtype=np.int64)
        answers = recommend(
            self.run.recommender,
            self.run.store,
            users_A,
            k,
            repeat="exclude",
            known=self.split.lengths(question)[users_A],
            request_times=self.asked[question][users_A] if self.timed else None,
            allowed_N=self.split.trained_I,
        )
        for answer in answers:
            top_UK[answer.user, : len(answer.items)] = answer.items
        return top_UK

    def history(self, user: int) -> Any:
        """Return what the test shows of a user, in original ids."""
        store, start = self.run.store, int(self.split.offsets_U1[user])
        rows = slice(start, start + int(self.split.lengths(TEST)[user]))
        items = [store.items.id(int(row)) for row in store.items_N[rows]]
        return History(items, store.timestamps_N[rows].copy())

    def recommend_one(self, history: Any, user: int, k: int = 10) -> Any:
        """Answer one request as `Run.recommend` answers it."""
        moment = int(self.asked[TEST][user]) if self.timed else None
        return self.run.recommend(histories=[history], k=k, repeat="exclude", request_time=moment)

    def time_requests(self) -> dict[str, float]:
        """Time single requests: one history goes in, ten unseen items come out."""
        users = users_to_time(self.split)
        histories = {int(user): self.history(int(user)) for user in users}
        return time_single(lambda user: self.recommend_one(histories[user], user), users)

    def lists_that_differ(self, top_UK: np.ndarray) -> int:
        """Count, over a few users, the timed answers that are not the user's list.

        A timed answer may name items that nobody trained; they are left out before comparing.
        """
        items, differ = self.run.store.items, 0
        for user in users_to_time(self.split, COMPARED).tolist():
            answer = self.recommend_one(self.history(user), user, k=50)
            rows = [items.row(item) for item in answer["item"].to_list()]
            trained = [row for row in rows if self.split.trained_I[row]]
            differ += int(trained[:10] != top_UK[user, : len(trained[:10])].tolist())
        return differ


def check_split(run: Any, split: Split) -> None:
    """Raise unless the recipe holds out what the split file holds out."""
    rule, store = run.recipe.split, run.store
    if not np.array_equal(rule.train_lengths(store), split.train_lengths_U):
        raise ValueError("the recipe's split differs from the split file")


def train(job: Job, contest: Contest) -> Any:
    """Train the recipe with its own settings and return the run, which has the best weights."""
    overrides = [str(each) for each in job.settings.get("overrides", ())]
    return api.train(
        job.settings["recipe"],
        *overrides,
        f"seed={job.seed}",
        f"threads={job.threads}",
        "train.log_every=1",
        "train.tensorboard=false",
        data=job.store,
        out=job.out / "run",
        quiet=True,
        callbacks=[Watcher(contest)],
    )


def main() -> None:
    """Train, let the recipe choose the epoch, answer the test question once."""
    job = Job.read()
    split = Split(job.split)
    import torch

    torch.set_num_threads(job.threads)
    contest = Contest(job, split)
    say(f"Slipstream {job.settings['recipe']}: training with {job.settings}")
    run = train(job, contest)
    check_split(run, split)
    answers = Answers(run, split, job.request_time)
    top_UK = answers.lists(TEST, job.k)
    contest.best = list_metrics(answers.lists(VALIDATION, JUDGED_AT), split.validation_U)
    single: dict[str, Any] = dict(answers.time_requests())
    single["lists_that_differ"] = answers.lists_that_differ(top_UK)
    contest.finish(top_UK, single, PACKAGES)
    shutil.rmtree(job.out / "run", ignore_errors=True)


if __name__ == "__main__":
    main()
