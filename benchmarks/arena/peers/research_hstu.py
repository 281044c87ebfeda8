"""The HSTU of Meta's generative-recommenders research code takes part in the contest.

Touch it when the modules under generative_recommenders/research change. The settings name the
checkout of that repository; its trainer needs a GPU, its modules do not, so the loop is here.
"""

from __future__ import annotations

import sys
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

PACKAGES = ("torch", "fbgemm-gpu-cpu", "gin-config", "numpy")
PUBLISHED = {  # configs/ml-1m/hstu-sampled-softmax-n128-final.gin
    "max_sequence_length": 200,
    "output_length": 11,
    "item_embedding_dim": 50,
    "num_blocks": 2,
    "num_heads": 1,
    "dqk": 50,
    "dv": 50,
    "dropout_rate": 0.2,
    "linear_dropout_rate": 0.2,
    "attn_dropout_rate": 0.0,
    "num_negatives": 128,
    "temperature": 0.05,
    "batch_size": 128,
    "learning_rate": 1e-3,
    "weight_decay": 0.0,
}


def build_encoder(num_items: int, settings: dict[str, Any], length: int, width: int) -> Any:
    """Return the encoder over histories of `length`, padded to `width`, in the trainer's parts."""
    from generative_recommenders.research.modeling.sequential import (
        embedding_modules,
        hstu,
        input_features_preprocessors,
        output_postprocessors,
    )
    from generative_recommenders.research.rails.similarities import dot_product_similarity_fn

    size = int(settings["item_embedding_dim"])
    positions = input_features_preprocessors.LearnablePositionalEmbeddingInputFeaturesPreprocessor(
        max_sequence_len=width,
        embedding_dim=size,
        dropout_rate=float(settings["dropout_rate"]),
    )
    return hstu.HSTU(
        max_sequence_len=length,
        max_output_len=width - length,
        embedding_dim=size,
        num_blocks=int(settings["num_blocks"]),
        num_heads=int(settings["num_heads"]),
        linear_dim=int(settings["dv"]),
        attention_dim=int(settings["dqk"]),
        normalization="rel_bias",
        linear_config="uvqk",
        linear_activation="silu",
        linear_dropout_rate=float(settings["linear_dropout_rate"]),
        attn_dropout_rate=float(settings["attn_dropout_rate"]),
        embedding_module=embedding_modules.LocalEmbeddingModule(num_items, size),
        similarity_module=dot_product_similarity_fn.DotProductSimilarity(),
        input_features_preproc_module=positions,
        output_postproc_module=output_postprocessors.L2NormEmbeddingPostprocessor(size, 1e-6),
        verbose=False,
    )


class ResearchModel:
    """The encoder, its loss and its negatives, put together as the research trainer does."""

    def __init__(self, split: Split, settings: dict[str, Any], request_time: bool) -> None:
        import torch
        from generative_recommenders.research.modeling.sequential import autoregressive_losses
        from generative_recommenders.research.modeling.sequential.losses import sampled_softmax

        self.split = split
        self.times_N = split.ordered_times()
        self.asked = {q: split.asked_times(q, request_time) for q in (VALIDATION, TEST)}
        self.length = int(settings["max_sequence_length"])
        self.width = self.length + int(settings["output_length"])
        self.network = build_encoder(split.num_items, settings, self.length, self.width)
        self.negatives = autoregressive_losses.LocalNegativesSampler(
            num_items=split.num_items,
            item_emb=self.network._embedding_module._item_emb,
            all_item_ids=(np.flatnonzero(split.trained_I) + 1).tolist(),
            l2_norm=True,
            l2_norm_eps=1e-6,
        )
        self.loss = sampled_softmax.SampledSoftmaxLoss(
            num_to_sample=int(settings["num_negatives"]),
            softmax_temperature=float(settings["temperature"]),
            model=self.network,
        )
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(),
            lr=float(settings["learning_rate"]),
            betas=(0.9, 0.98),
            weight_decay=float(settings["weight_decay"]),
        )
        self.items_IE: Any = None

    def batch(self, users_B: np.ndarray, question: str, length: int) -> tuple[Any, Any, Any]:
        """Return ids (row + 1, 0 behind), times and counts of the last `length` behaviours."""
        import torch

        items_BL, counts_B = self.split.padded(users_B, question, length, pad=-1, left=False)
        times_BL, _ = self.split.padded(users_B, question, length, self.times_N, left=False)
        beyond = ((0, 0), (0, self.width - length))
        ids_BW = np.pad(items_BL + 1, beyond)
        times_BW = np.pad(times_BL, beyond)
        return torch.from_numpy(ids_BW), torch.from_numpy(times_BW), torch.from_numpy(counts_B)

    def step(self, users_B: np.ndarray) -> None:
        """Learn every next item of these users' last training behaviours."""
        ids_BW, times_BW, counts_B = self.batch(users_B, VALIDATION, self.length + 1)
        past_B = counts_B - 1  # the last behaviour is only a target
        embeddings = self.network.get_item_embeddings(ids_BW)
        encoded = self.network(
            past_lengths=past_B,
            past_ids=ids_BW,
            past_embeddings=embeddings,
            past_payloads={"timestamps": times_BW},
        )
        loss, _ = self.loss(
            lengths=past_B,
            output_embeddings=encoded[:, :-1, :],
            supervision_ids=ids_BW[:, 1:],
            supervision_embeddings=embeddings[:, 1:, :],
            supervision_weights=(ids_BW[:, 1:] != 0).float(),
            negatives_sampler=self.negatives,
        )
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def ready(self) -> None:
        """Leave training, and keep the normalized items, which all requests share."""
        import torch

        self.network.eval()
        with torch.no_grad():
            ids_I = torch.arange(1, self.split.num_items + 1)
            items_IE = self.network.get_item_embeddings(ids_I)
            self.items_IE = self.negatives.normalize_embeddings(items_IE)

    def scores(self, users_B: np.ndarray, question: str) -> Any:
        """Score the whole catalogue at the time of the request."""
        import torch

        ids_BW, times_BW, counts_B = self.batch(users_B, question, self.length)
        asked_B1 = torch.from_numpy(self.asked[question][users_B]).view(-1, 1)
        times_BW.scatter_(1, counts_B.view(-1, 1), asked_B1)
        with torch.no_grad():
            queries_BE = self.network.encode(
                past_lengths=counts_B,
                past_ids=ids_BW,
                past_embeddings=self.network.get_item_embeddings(ids_BW),
                past_payloads={"timestamps": times_BW},
            )
            return queries_BE @ self.items_IE.T


def train(model: ResearchModel, contest: Contest, batch_size: int) -> None:
    """Run epochs over all users with something to predict; leave the best weights in place."""
    chance = np.random.default_rng(contest.job.seed)
    users_T = np.flatnonzero(contest.split.train_lengths_U >= 2)
    for _ in range(contest.job.epochs):
        with contest.clock.training():
            model.network.train()
            order_T = chance.permutation(users_T)
            for start in range(0, len(order_T), batch_size):
                model.step(order_T[start : start + batch_size])
        model.ready()
        top_UK = contest.split.answer(
            VALIDATION, 10, lambda users_B: model.scores(users_B, VALIDATION).numpy()
        )
        if contest.epoch_done(top_UK, lambda: copy_state(model.network)):
            break
    model.network.load_state_dict(contest.best_weights)
    model.ready()


def time_requests(model: ResearchModel) -> dict[str, float]:
    """Time single requests: encode one history, score the catalogue, keep ten unseen items."""
    import torch

    split = model.split
    hidden_I = torch.from_numpy(~split.trained_I)

    def recommend_one(user: int) -> None:
        scores_I = model.scores(np.array([user]), TEST)[0].masked_fill(hidden_I, -torch.inf)
        scores_I[torch.from_numpy(split.history(user, TEST))] = -torch.inf
        torch.topk(scores_I, 10)

    return time_single(recommend_one, users_to_time(split))


def main() -> None:
    """Train, judge every epoch, answer the test question once."""
    job = Job.read()
    split = Split(job.split)
    warnings.filterwarnings("ignore")
    settings: dict[str, Any] = {**PUBLISHED, **job.settings}
    sys.path.insert(0, str(settings.pop("checkout")))
    import fbgemm_gpu  # noqa: F401  (registers the jagged operators)
    import torch

    torch.set_num_threads(job.threads)
    torch.manual_seed(job.seed)
    contest = Contest(job, split)
    model = ResearchModel(split, settings, job.request_time)
    say(f"research HSTU: training with {settings}")
    train(model, contest, int(settings["batch_size"]))
    top_UK = split.answer(TEST, job.k, lambda users_B: model.scores(users_B, TEST).numpy())
    contest.finish(top_UK, time_requests(model), PACKAGES)


if __name__ == "__main__":
    main()
