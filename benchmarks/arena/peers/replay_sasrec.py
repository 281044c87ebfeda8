"""RePlay's SASRec takes part in the contest; single requests also go through its OpenVINO model.

Touch it when RePlay changes its Lightning module `SasRec`, its sequential data sets or
`SasRecCompiled`. All of these stand in `replay.models.nn.sequential`, the API that can be compiled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.arena.peers.contest_io import (
    Contest,
    Job,
    copy_state,
    peak_bytes,
    say,
    time_single,
    users_to_time,
)
from benchmarks.arena.peers.contest_split import TEST, VALIDATION, Split, largest

PACKAGES = ("replay-rec", "torch", "lightning", "numpy", "pandas", "polars", "openvino")
USER, ITEM = "user_id", "item_id"


class Logs:
    """The split as RePlay takes it: one sequence of item rows per user."""

    def __init__(self, split: Split, hidden_size: int) -> None:
        from replay.data import FeatureHint, FeatureType
        from replay.data.nn import TensorFeatureInfo, TensorSchema

        self.split = split
        self.schema = TensorSchema(
            TensorFeatureInfo(
                name=ITEM,
                feature_type=FeatureType.CATEGORICAL,
                is_seq=True,
                feature_hint=FeatureHint.ITEM_ID,
                cardinality=split.num_items,
                embedding_dim=hidden_size,
            )
        )

    def sequences(self, question: str, users_B: np.ndarray) -> Any:
        """Return the histories of these users as a RePlay data set."""
        import pandas as pd
        from replay.data.nn import PandasSequentialDataset

        frame = pd.DataFrame(
            {
                USER: users_B,
                ITEM: [self.split.history(int(user), question).tolist() for user in users_B],
            }
        )
        return PandasSequentialDataset(
            tensor_schema=self.schema,
            query_id_column=USER,
            item_id_column=ITEM,
            sequences=frame,
        )


def build_model(job: Job, logs: Logs) -> Any:
    """Return RePlay's Lightning module; the learning rate and the decay go to its optimizer."""
    from replay.models.nn.optimizer_utils import FatOptimizerFactory
    from replay.models.nn.sequential import SasRec

    settings = dict(job.settings)
    for ours in ("batch_size", "sliding_window_step"):
        settings.pop(ours, None)
    optimizer = FatOptimizerFactory(
        optimizer=settings.pop("optimizer", "adam"),
        learning_rate=float(settings.pop("learning_rate", 0.001)),
        weight_decay=float(settings.pop("weight_decay", 0.0)),
    )
    return SasRec(tensor_schema=logs.schema, optimizer_factory=optimizer, **settings)


def training_loader(job: Job, logs: Logs) -> Any:
    """Return the batches of all users with something to predict in their training part."""
    from replay.models.nn.sequential.sasrec import SasRecTrainingDataset
    from torch.utils.data import DataLoader

    users_B = np.flatnonzero(logs.split.train_lengths_U >= 2)
    dataset = SasRecTrainingDataset(
        sequential=logs.sequences(VALIDATION, users_B),
        max_sequence_length=int(job.settings.get("max_seq_len", 200)),
        sliding_window_step=job.settings.get("sliding_window_step"),
    )
    return DataLoader(dataset, batch_size=int(job.settings.get("batch_size", 128)), shuffle=True)


def prediction_dataset(job: Job, logs: Logs, question: str, users_B: np.ndarray) -> Any:
    """Return what asks for these users, in their order; a history is encoded when it is taken."""
    from replay.models.nn.sequential.sasrec import SasRecPredictionDataset

    return SasRecPredictionDataset(
        sequential=logs.sequences(question, users_B),
        max_sequence_length=int(job.settings.get("max_seq_len", 200)),
    )


def ranker(job: Job, logs: Logs, question: str) -> Callable[[Any, int], np.ndarray]:
    """Return what answers a question for all users with the model's present weights."""
    import torch
    from torch.utils.data import DataLoader

    split = logs.split
    users_A = split.askers(question)
    dataset = prediction_dataset(job, logs, question, users_A)
    loader = DataLoader(dataset, batch_size=256, shuffle=False)

    def rank(model: Any, k: int) -> np.ndarray:
        top_UK = np.full((split.num_users, k), -1, dtype=np.int64)
        model.eval()
        done = 0
        with torch.no_grad():
            for batch in loader:
                scores_BI = model.predict(batch).cpu().numpy()
                users_B = users_A[done : done + len(scores_BI)]
                top_UK[users_B] = split.best_rows(scores_BI, users_B, question, k)
                done += len(scores_BI)
        return top_UK

    return rank


def make_watcher(contest: Contest, rank: Callable[[Any, int], np.ndarray]) -> Any:
    """Return the Lightning callback that judges every epoch and stops the training."""
    from lightning.pytorch.callbacks import Callback

    class Watcher(Callback):
        """Counts training time, and asks the contest after every epoch."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            contest.clock.start()

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            contest.clock.stop()
            ends = contest.epoch_done(rank(pl_module, 10), lambda: copy_state(pl_module))
            pl_module.train()
            if ends:
                trainer.should_stop = True
            else:
                contest.clock.start()

    return Watcher()


def train(job: Job, logs: Logs, contest: Contest, model: Any) -> None:
    """Fit with Lightning, and leave the model with the weights of the best epoch."""
    from lightning.pytorch import Trainer

    trainer = Trainer(
        max_epochs=job.epochs,
        min_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[make_watcher(contest, ranker(job, logs, VALIDATION))],
    )
    trainer.fit(model, training_loader(job, logs))
    contest.clock.stop()
    model.load_state_dict(contest.best_weights)
    model.eval()


def time_requests(job: Job, logs: Logs, predict: Callable[[Any], Any]) -> dict[str, float]:
    """Time single requests: one user's history goes in, ten unseen items come out."""
    import torch
    from torch.utils.data import default_collate

    split = logs.split
    users = users_to_time(split)
    histories = prediction_dataset(job, logs, TEST, users)
    places = {int(user): place for place, user in enumerate(users)}
    hidden_I = torch.from_numpy(~split.trained_I)

    def recommend_one(user: int) -> None:
        with torch.no_grad():
            batch = default_collate([histories[places[user]]])
            scores_I = predict(batch)[0].masked_fill(hidden_I, -torch.inf)
            scores_I[torch.from_numpy(split.history(user, TEST))] = -torch.inf
            torch.topk(scores_I, 10)

    return time_single(recommend_one, users)


def time_compiled(job: Job, logs: Logs, model: Any) -> dict[str, Any]:
    """Time the same requests through OpenVINO, or say why that does not work here."""
    try:
        from replay.models.nn.sequential.compiled import SasRecCompiled

        compiled = SasRecCompiled.compile(model, mode="one_query", num_threads=job.threads)
        differ = lists_that_differ(job, logs, model, compiled)
        return {**time_requests(job, logs, compiled.predict), "lists_that_differ": differ}
    except Exception as problem:  # an extra of the library, with exporters of its own
        say(f"no compiled model: {problem!r}")
        return {"problem": repr(problem)}


def lists_that_differ(job: Job, logs: Logs, model: Any, compiled: Any) -> int:
    """Count, over a few users, the lists of ten that the compiled model answers otherwise."""
    import torch
    from torch.utils.data import DataLoader

    dataset = prediction_dataset(job, logs, TEST, users_to_time(logs.split, 20))
    differ = 0
    with torch.no_grad():
        for batch in DataLoader(dataset, batch_size=1, shuffle=False):
            first = largest(model.predict(batch).numpy(), 10)
            second = largest(compiled.predict(batch).numpy(), 10)
            differ += int(not np.array_equal(first, second))
    return differ


def main() -> None:
    """Train, judge every epoch, answer the test question once."""
    job = Job.read()
    split = Split(job.split)
    warnings.filterwarnings("ignore")
    import torch
    from lightning.pytorch import seed_everything

    torch.set_num_threads(job.threads)
    seed_everything(job.seed, workers=True)
    contest = Contest(job, split)
    logs = Logs(split, int(job.settings.get("hidden_size", 50)))
    model = build_model(job, logs)
    say(f"RePlay SASRec: training with {job.settings}")
    train(job, logs, contest, model)
    top_UK = ranker(job, logs, TEST)(model, job.k)
    single: dict[str, Any] = time_requests(job, logs, model.predict)
    single["peak_bytes"] = peak_bytes()  # the compiled model comes on top of the contest
    single["compiled"] = time_compiled(job, logs, model)
    contest.finish(top_UK, single, PACKAGES)


if __name__ == "__main__":
    main()
