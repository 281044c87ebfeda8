"""RecBole's sequential models, SASRec first, take part in the contest.

Touch it when RecBole changes its sequential data set, its Trainer or its models' full sort.

RecBole gets the training part alone, as an atomic file in a scratch folder, with places in the log
for times; its Trainer runs one epoch after another, and the questions are asked here.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
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

PACKAGES = ("recbole", "torch", "numpy", "pandas", "scipy")
NAME = "arena"


def write_log(split: Split, folder: Path) -> None:
    """Write the training part as RecBole's atomic file of behaviours."""
    (folder / NAME).mkdir()
    rows = split.rows(VALIDATION)
    users = split.users_N[rows]
    places = rows - split.offsets_U1[users]
    with (folder / NAME / f"{NAME}.inter").open("w", encoding="utf-8") as file:
        file.write("user_id:token\titem_id:token\ttimestamp:float\n")
        table = np.stack([users, split.items_N[rows], places], axis=1)
        np.savetxt(file, table, fmt="%d", delimiter="\t")


def model_class(name: str) -> Any:
    """Return RecBole's model; its class goes to Config, which then imports no other family."""
    from recbole.model import sequential_recommender

    return getattr(sequential_recommender, {"sasrec": "SASRec"}.get(name, name))


def make_config(job: Job, folder: Path, kind: Any) -> Any:
    """Return RecBole's configuration: cross entropy over all items, on the processor."""
    from recbole.config import Config

    settings = {
        "data_path": str(folder),
        "checkpoint_dir": str(folder / "saved"),
        "USER_ID_FIELD": "user_id",
        "ITEM_ID_FIELD": "item_id",
        "TIME_FIELD": "timestamp",
        "load_col": {"inter": ["user_id", "item_id", "timestamp"]},
        "eval_args": {
            "split": {"LS": "valid_and_test"},
            "order": "TO",
            "group_by": "user",
            "mode": "full",
        },
        "loss_type": "CE",
        "train_neg_sample_args": None,
        "epochs": job.epochs,
        "seed": job.seed,
        "reproducibility": True,
        "use_gpu": False,
        "worker": 0,
        "show_progress": False,
        "state": "WARNING",
        **job.settings,
    }
    return Config(model=kind, dataset=NAME, config_dict=settings)


class Asker:
    """Puts questions to a RecBole model: our item rows become its tokens, and back."""

    def __init__(self, model: Any, dataset: Any, split: Split, length: int) -> None:
        self.model, self.split, self.length = model, split, length
        self.tokens_I = np.zeros(split.num_items, dtype=np.int64)  # 0 is RecBole's padding
        for word, token in dataset.field2token_id[dataset.iid_field].items():
            if word != "[PAD]":
                self.tokens_I[int(word)] = int(token)
        self.known_V = np.flatnonzero(self.tokens_I)

    def sequences(self, users_B: np.ndarray, question: str) -> Any:
        """Return the histories as RecBole batches them: tokens first, padding behind."""
        import torch
        from recbole.data.interaction import Interaction

        items_BL, _ = self.split.padded(users_B, question, self.length, pad=-1, left=False)
        tokens_BL = np.where(items_BL >= 0, self.tokens_I[items_BL], 0)
        order_BL = np.argsort(tokens_BL == 0, axis=1, kind="stable")  # unknown items drop out
        tokens_BL = np.take_along_axis(tokens_BL, order_BL, axis=1)
        lengths_B = np.maximum((tokens_BL > 0).sum(axis=1), 1)
        return Interaction(
            {
                self.model.ITEM_SEQ: torch.from_numpy(tokens_BL),
                self.model.ITEM_SEQ_LEN: torch.from_numpy(lengths_B),
            }
        )

    def scorer(self, question: str) -> Callable[[np.ndarray], np.ndarray]:
        """Return what scores the whole catalogue for a batch of users."""
        import torch

        def score(users_B: np.ndarray) -> np.ndarray:
            self.model.eval()
            with torch.no_grad():
                scores_BV = self.model.full_sort_predict(self.sequences(users_B, question))
            scores_BI = np.full((len(users_B), self.split.num_items), -np.inf, dtype=np.float32)
            tokens_V = self.tokens_I[self.known_V]
            scores_BI[:, self.known_V] = scores_BV.cpu().numpy()[:, tokens_V]
            return scores_BI

        return score


def until_far_over(batches: Any, contest: Contest) -> Iterator[Any]:
    """Yield the batches of one epoch, fewer when it takes far more than the budget."""
    for batch in batches:
        if contest.cuts_epoch():
            return
        yield batch


def train(job: Job, contest: Contest, config: Any, dataset: Any, asker: Asker) -> None:
    """Run RecBole's epochs, and leave the model with the weights of the best one."""
    from recbole.data.dataloader import TrainDataLoader
    from recbole.trainer import Trainer

    model = asker.model
    batches = TrainDataLoader(config, dataset, None, shuffle=True)
    trainer = Trainer(config, model)
    for epoch in range(job.epochs):
        with contest.clock.training():
            trainer._train_epoch(until_far_over(batches, contest), epoch, show_progress=False)
        top_UK = contest.split.answer(VALIDATION, 10, asker.scorer(VALIDATION))
        if contest.epoch_done(top_UK, lambda: copy_state(model)):
            break
    model.load_state_dict(contest.best_weights)
    model.eval()


def time_requests(asker: Asker) -> dict[str, float]:
    """Time single requests: RecBole's full sort scores, and the ten best unseen items stay."""
    import torch

    split = asker.split

    def recommend_one(user: int) -> None:
        with torch.no_grad():
            asked = asker.sequences(np.array([user]), TEST)
            scores_V = asker.model.full_sort_predict(asked)[0]
            seen = torch.from_numpy(asker.tokens_I[split.history(user, TEST)])
            scores_V[seen] = -torch.inf
            scores_V[0] = -torch.inf
            torch.topk(scores_V, 10)

    return time_single(recommend_one, users_to_time(split))


def compete(job: Job, split: Split, folder: Path) -> None:
    """Train, judge every epoch, answer the test question once."""
    import torch
    from recbole.data import create_dataset
    from recbole.utils import init_seed

    torch.set_num_threads(job.threads)
    write_log(split, folder)
    kind = model_class(job.model)
    config = make_config(job, folder, kind)
    init_seed(config["seed"], config["reproducibility"])
    dataset = create_dataset(config)
    dataset._change_feat_format()  # makes one row of every prefix, without holding any out
    model = kind(config, dataset).to(config["device"])
    asker = Asker(model, dataset, split, int(config["MAX_ITEM_LIST_LENGTH"]))
    contest = Contest(job, split)
    say(f"RecBole {job.model}: training with {job.settings}")
    train(job, contest, config, dataset, asker)
    top_UK = split.answer(TEST, job.k, asker.scorer(TEST))
    contest.finish(top_UK, time_requests(asker), PACKAGES)


def main() -> None:
    """Compete in a scratch folder, where RecBole may leave its logs."""
    job = Job.read()
    split = Split(job.split)
    warnings.filterwarnings("ignore")
    home = Path.cwd()
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        try:
            compete(job, split, Path(scratch))
        finally:
            os.chdir(home)


if __name__ == "__main__":
    main()
