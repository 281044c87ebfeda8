"""Small models and seeded inputs for the model tests."""

from dataclasses import replace

import torch

from slipstream.models.build import build_model
from slipstream.models.inputs import ModelInput
from slipstream.models.model_config import ModelConfig

TASKS = ["click", "like"]
KINDS = ["hstu", "fuxi", "sasrec"]


def config(kind, **settings):
    base = {
        "kind": kind,
        "dim": 8,
        "blocks": 2,
        "heads": 2,
        "max_len": 16,
        "dropout": 0.3,
        "input_dropout": 0.1,
        "head_dim": 4,
    }
    return ModelConfig(**(base | settings))


def model(
    kind, task="retrieval", dtype=torch.float64, user_features=(), item_features=(), **settings
):
    """A model with weights large enough that every part of it changes the output."""
    torch.manual_seed(7)
    tasks = TASKS if task == "ranking" else ()
    built = build_model(config(kind, **settings), task, tasks, user_features, item_features).to(
        dtype
    )
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=dtype) * 0.3)
    return built


def given(
    lengths,
    candidates=None,
    dim=8,
    dtype=torch.float64,
    seed=0,
    user_features=(),
    item_features=(),
    dropout_seed=None,
):
    """A batch of sequences of these lengths; `candidates` says how many of each are candidates."""
    generator = torch.Generator().manual_seed(seed)
    tokens, users = sum(lengths), len(lengths)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    times, next_times, ids = (torch.zeros(tokens, dtype=torch.int64) for _ in range(3))
    for b, (start, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        steps = torch.randint(1, 5000, (end - start + 1,), generator=generator)
        clock = 1_000_000_000 + (steps * steps).cumsum(0)
        times[start:end], next_times[start:end] = clock[:-1], clock[1:]
        ids[start:end] = torch.arange(end - start) + (100 + b) * (1 << 24)
    item_rows = {"item": tokens} | {f"item.{name}": tokens for name in item_features}
    rows = item_rows | {f"user.{name}": users for name in user_features}
    return ModelInput(
        rows={
            name: torch.randn(count, dim, generator=generator, dtype=dtype)
            for name, count in rows.items()
        },
        offsets_B1=offsets,
        timestamps_T=times,
        next_timestamps_T=next_times,
        token_ids_T=ids,
        labels_TA=torch.randint(0, 2, (tokens, len(TASKS)), generator=generator).float(),
        num_candidates_B=None
        if candidates is None
        else torch.tensor(candidates, dtype=torch.int64),
        dropout_seed=dropout_seed,
    )


def part(batch, b, first=0, last=None, candidates=None):
    """Behaviours `first` to `last` of sequence b as a batch of its own."""
    start, end = int(batch.offsets_B1[b]), int(batch.offsets_B1[b + 1])
    tokens = slice(start + first, end if last is None else start + last)
    size = tokens.stop - tokens.start
    if candidates is None and batch.num_candidates_B is not None:
        candidates = int(batch.num_candidates_B[b])
    return replace(
        batch,
        rows={
            n: (r[b : b + 1] if n.startswith("user.") else r[tokens]) for n, r in batch.rows.items()
        },
        offsets_B1=torch.tensor([0, size]),
        timestamps_T=batch.timestamps_T[tokens],
        next_timestamps_T=batch.next_timestamps_T[tokens],
        token_ids_T=batch.token_ids_T[tokens],
        labels_TA=batch.labels_TA[tokens],
        num_candidates_B=torch.tensor([candidates]) if candidates else None,
    )


def prefill(net, batch, past=None):
    """Keys and values of a history for a later call's `past`, without the held-back behaviours."""
    stream = net.stream(batch, past)
    _, kept = net.backbone(stream.x_SD, stream.layout, past, keep_kv=True)
    if net.held_back_behaviours == 0:
        return kept
    held_B = net.tokens_per_behaviour * (batch.offsets_B1.diff() > 0).long()
    return [kv.first(kv.offsets_B1.diff() - held_B) for kv in kept]


def rows_of(batch, b):
    return slice(int(batch.offsets_B1[b]), int(batch.offsets_B1[b + 1]))
