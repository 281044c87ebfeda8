"""RecTools' transformers, HSTU and SASRec, take part in the contest.

Touch it when RecTools changes its transformer models, its data sets or its recommend call.

RecTools sorts behaviours by time with a stable sort, so rows in the log's order stay in that order
where times are equal: the times go in as they are.
"""

from __future__ import annotations

import importlib
import warnings
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

PACKAGES = ("rectools", "torch", "pytorch-lightning", "numpy", "pandas", "scipy")


class Requests:
    """The split as RecTools takes it: data sets of histories, and the time of each request."""

    def __init__(self, split: Split, request_time: bool) -> None:
        self.split = split
        self.times_N = split.ordered_times()
        self.asked = {q: split.asked_times(q, request_time) for q in (VALIDATION, TEST)}
        if not np.array_equal(self.times_N, split.times_N):
            say("some times run backwards: RecTools gets the running maximum of each user's times")

    def dataset(self, question: str, users_B: np.ndarray | None = None) -> Any:
        """Return the histories of these users, or of all, as a RecTools data set."""
        import pandas as pd
        from rectools import Columns
        from rectools.dataset import Dataset

        rows = self.split.rows(question, users_B)
        frame = pd.DataFrame(
            {
                Columns.User: self.split.users_N[rows],
                Columns.Item: self.split.items_N[rows],
                Columns.Weight: np.ones(len(rows)),
                Columns.Datetime: as_datetimes(self.times_N[rows]),
            }
        )
        return Dataset.construct(frame)

    def context(self, question: str, users_B: np.ndarray) -> Any:
        """Return one row per user which says when the request comes."""
        import pandas as pd
        from rectools import Columns

        return pd.DataFrame(
            {
                Columns.User: users_B,
                Columns.Datetime: as_datetimes(self.asked[question][users_B]),
                Columns.Weight: np.ones(len(users_B)),
            }
        )


def as_datetimes(seconds: np.ndarray) -> np.ndarray:
    """Return seconds as datetimes in nanoseconds, the unit RecTools divides by."""
    return seconds.astype("datetime64[s]").astype("datetime64[ns]")


def recommend(model: Any, dataset: Any, users_B: np.ndarray, k: int, context: Any) -> Any:
    """Call RecTools' own recommend; it writes into the context, so it gets a copy."""
    return model.recommend(
        users=users_B,
        dataset=dataset,
        k=k,
        filter_viewed=True,
        on_unsupported_targets="ignore",
        context=context.copy() if model.require_recommend_context else None,
    )


def as_lists(table: Any, num_users: int, k: int) -> np.ndarray:
    """Return RecTools' table of answers as one list of item rows per user."""
    from rectools import Columns

    top_UK = np.full((num_users, k), -1, dtype=np.int64)
    users = table[Columns.User].to_numpy().astype(np.int64)
    ranks = table[Columns.Rank].to_numpy().astype(np.int64)
    top_UK[users, ranks - 1] = table[Columns.Item].to_numpy().astype(np.int64)
    return top_UK


def model_settings(job: Job, split: Split) -> dict[str, Any]:
    """Return the constructor's arguments; a type named by its dotted path becomes the type."""
    from rectools.models.nn.item_net import IdEmbeddingsItemNet

    settings: dict[str, Any] = {
        "item_net_block_types": (IdEmbeddingsItemNet,),
        "recommend_torch_device": "cpu",
        **job.settings,
    }
    if job.model == "hstu":
        settings.setdefault("relative_time_attention", split.timed)
    for name, value in settings.items():
        if name.endswith("_type") and isinstance(value, str):
            module, _, attribute = value.rpartition(".")
            settings[name] = getattr(importlib.import_module(module), attribute)
    if "logits_t" in settings:
        lightning = dict(settings.get("lightning_module_kwargs") or {})
        lightning["logits_t"] = settings.pop("logits_t")
        settings["lightning_module_kwargs"] = lightning
    return settings


def make_watcher(contest: Contest, judge: Any, expected: dict[str, Any]) -> Any:
    """Return the Lightning callback that judges every epoch and stops the training."""
    from pytorch_lightning import Callback

    class Watcher(Callback):
        """Counts training time, and asks the contest after every epoch."""

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            return self  # RecTools copies its trainer before it fits

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            for name, value in expected.items():
                if getattr(pl_module, name, None) != value:
                    raise ValueError(f"RecTools' Lightning module takes no {name!r}")
            contest.clock.start()

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            contest.clock.stop()
            ends = contest.epoch_done(judge(), lambda: copy_state(pl_module))
            pl_module.train()  # recommending leaves the network in evaluation mode
            if ends:
                trainer.should_stop = True
            else:
                contest.clock.start()

    return Watcher()


def build_model(job: Job, split: Split, contest: Contest, requests: Requests) -> Any:
    """Return the model with a trainer that judges every epoch on the validation question."""
    from pytorch_lightning import Trainer
    from rectools.models import HSTUModel, SASRecModel

    users_A = split.askers(VALIDATION)
    dataset = requests.dataset(VALIDATION)
    context = requests.context(VALIDATION, users_A)
    settings = model_settings(job, split)
    made: list[Any] = []

    def judge() -> np.ndarray:
        made[0].is_fitted = True  # the weights are there, though fit has not returned
        table = recommend(made[0], dataset, users_A, 10, context)
        return as_lists(table, split.num_users, 10)

    watcher = make_watcher(contest, judge, settings.get("lightning_module_kwargs") or {})

    def get_trainer() -> Any:
        return Trainer(
            max_epochs=job.epochs,
            min_epochs=1,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[watcher],
        )

    kinds = {"hstu": HSTUModel, "sasrec": SASRecModel}
    made.append(kinds[job.model](get_trainer_func=get_trainer, **settings))
    return made[0]


def time_requests(model: Any, split: Split, requests: Requests) -> dict[str, float]:
    """Time single requests; each brings a data set of its user's history alone."""
    users = users_to_time(split)
    prepared = {}
    for user in users.tolist():
        user_1 = np.array([user])
        prepared[user] = (requests.dataset(TEST, user_1), user_1, requests.context(TEST, user_1))

    def recommend_one(user: int) -> None:
        dataset, user_1, context = prepared[user]
        recommend(model, dataset, user_1, 10, context)

    return time_single(recommend_one, users)


def main() -> None:
    """Train, judge every epoch, answer the test question once."""
    job = Job.read()
    split = Split(job.split)
    warnings.filterwarnings("ignore")
    import torch
    from pytorch_lightning import seed_everything

    torch.set_num_threads(job.threads)
    seed_everything(job.seed, workers=True)
    contest = Contest(job, split)
    requests = Requests(split, job.request_time)
    model = build_model(job, split, contest, requests)
    say(f"RecTools {job.model}: training with {job.settings}")
    model.fit(requests.dataset(VALIDATION))
    contest.clock.stop()
    model.lightning_model.load_state_dict(contest.best_weights)

    users_A = split.askers(TEST)
    context = requests.context(TEST, users_A)
    table = recommend(model, requests.dataset(TEST), users_A, job.k, context)
    top_UK = as_lists(table, split.num_users, job.k)
    contest.finish(top_UK, time_requests(model, split, requests), PACKAGES)


if __name__ == "__main__":
    main()
