"""Evaluation on held-out behaviours, the same for validation in training and for the final test.

Retrieval ranks the whole catalogue for the user's next behaviour, by the recipe's rules `repeat`
(may seen items be recommended?) and `window` (which behaviours does the model see?): what is
measured is what is served. SASRec's sampled protocol (the target among 100 random items) is there
for comparison with older tables only. Ranking scores the actions on each held-out behaviour given
all that came before it. Touch this when a protocol changes; the figures themselves are in
`metrics.py`, what is known without a model in `held_out.py`.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import numpy as np
import torch

from slipstream.data.batch import JaggedBatch
from slipstream.data.sampler import evaluation_batches
from slipstream.data.store import SequenceStore
from slipstream.history.window import window_start
from slipstream.ops.counter_random import derive_seed, random_integers
from slipstream.ops.row_readers import RowTile
from slipstream.ops.tiled_search import Pairs, count_rivals, score_pairs
from slipstream.training import metrics
from slipstream.training.breakdown import Breakdown
from slipstream.training.features import labels_TA
from slipstream.training.held_out import Which, describe_held_out, held_out_behaviours
from slipstream.training.own_functions import NO_FUNCTIONS, OwnFunctions
from slipstream.training.popularity import BASELINE, action_rates, item_counts
from slipstream.training.ranks import ALONE, Ranks
from slipstream.training.recipe import Recipe
from slipstream.training.seen import seen_pairs

QUERY_TILE = 1024  # queries whose figures are added up at once
SEEN_A_PASS = 1 << 21  # seen behaviours of the queries that share one pass over the catalogue


class Recommends(Protocol):
    """What evaluation asks of a trained model."""

    def catalogue_tiles(self) -> Iterator[RowTile]: ...
    def item_vectors_CD(self, items_C: torch.Tensor) -> torch.Tensor: ...
    def queries_SD(self, batch: JaggedBatch) -> torch.Tensor: ...
    def predict_SA(self, batch: JaggedBatch) -> torch.Tensor: ...


@dataclass(frozen=True)
class Evaluation:
    """The figures of an evaluation, and those of groups of queries (retrieval only)."""

    figures: dict[str, float]
    slices: list[dict[str, Any]] = field(default_factory=list)


def evaluate(
    recommender: Recommends,
    store: SequenceStore,
    recipe: Recipe,
    which: Which,
    ranks: Ranks = ALONE,
    own: OwnFunctions = NO_FUNCTIONS,
) -> dict[str, float]:
    """Compute the metrics of the recipe's task on held-out behaviours; ranks share the batches."""
    return evaluate_in_detail(recommender, store, recipe, which, ranks, own=own).figures


def evaluate_in_detail(
    recommender: Recommends,
    store: SequenceStore,
    recipe: Recipe,
    which: Which,
    ranks: Ranks = ALONE,
    *,
    hide_request_time: bool = False,
    own: OwnFunctions = NO_FUNCTIONS,
) -> Evaluation:
    """Compute the metrics of the recipe's task, and of its slices.

    `hide_request_time`: each query looks back from its own last behaviour's time.
    """
    batches = share_batches(_batches(store, recipe, which), ranks)
    with torch.no_grad():
        if recipe.task == "ranking":
            return Evaluation(evaluate_ranking(recommender, batches, store, recipe, which, ranks))
        if hide_request_time:
            batches = (without_request_time(batch) for batch in batches)
        return evaluate_retrieval(recommender, batches, store, recipe, which, ranks, own)


def share_batches(batches: Iterator[JaggedBatch], ranks: Ranks) -> Iterator[JaggedBatch]:
    """Yield this rank's batches, one of every `world`.

    Where the last round has none for it, the batch is empty: lookups are collective.
    """
    if ranks.world == 1:
        yield from batches
        return
    while turn := list(itertools.islice(batches, ranks.world)):
        yield turn[ranks.rank] if ranks.rank < len(turn) else without_users(turn[0])


def without_users(batch: JaggedBatch) -> JaggedBatch:
    """Return a batch of the same kind without users."""
    emptied: dict[str, Any] = {
        each.name: {name: part[:0] for name, part in value.items()}
        if isinstance(value, dict)
        else None
        if value is None
        else value[:0]
        for each in fields(batch)
        for value in (getattr(batch, each.name),)
    }
    return replace(batch, **{**emptied, "offsets_B1": batch.offsets_B1[:1]})


def _batches(store: SequenceStore, recipe: Recipe, which: Which) -> Iterator[JaggedBatch]:
    max_len = recipe.sampler.max_len
    return evaluation_batches(
        store,
        which,
        max_len=max_len,
        batch_size=256,
        task=recipe.task,
        holdout=recipe.split,
        start=functools.partial(window_start, max_len=max_len, rule=recipe.window),
    )


def evaluate_without_request_time(
    recommender: Recommends, store: SequenceStore, recipe: Recipe, which: Which
) -> dict[str, float]:
    """Compute retrieval metrics for queries that do not know the time they are asked at.

    The difference shows how much a model with `time_bias: next` gains from the request's time,
    which models without time never see.
    """
    return evaluate_in_detail(recommender, store, recipe, which, hide_request_time=True).figures


def without_request_time(batch: JaggedBatch) -> JaggedBatch:
    """Let each query look back from its own last behaviour's time."""
    hidden_T = torch.where(batch.supervised_T, batch.timestamps_T, batch.next_timestamps_T)
    return replace(batch, next_timestamps_T=hidden_T)


def supervised_places(batch: JaggedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, per supervised token, its user's row and how many behaviours the query may know."""
    where_S = batch.supervised_T.nonzero().squeeze(1)
    segment_S = torch.searchsorted(batch.offsets_B1, where_S, right=True) - 1
    places_S = where_S - batch.offsets_B1[segment_S] + batch.first_positions_B[segment_S]
    return batch.sample_ids_B[segment_S], places_S + 1


def evaluate_retrieval(
    recommender: Recommends,
    batches: Iterator[JaggedBatch],
    store: SequenceStore,
    recipe: Recipe,
    which: Which,
    ranks: Ranks = ALONE,
    own: OwnFunctions = NO_FUNCTIONS,
) -> Evaluation:
    """Compute HR, NDCG and MRR over the full catalogue, by the recipe's `repeat` rule."""
    found, all_places = metrics.RankingMetrics(), [torch.empty(0, dtype=torch.float64)]
    slices = Breakdown(held_out_behaviours(store, recipe, which), item_counts(store, recipe))
    for queries in group_queries(recommender, batches, ranks):
        above_S, tied_S = target_places(recommender, store, recipe, queries)
        for tile in queries.tiles():
            places = above_S[tile], tied_S[tile]
            found.add(*places)
            slices.add(queries.known_S[tile], queries.targets_S[tile], *places)
            if own.metrics:
                all_places.append(metrics.mean_places(*places))
    found.take_over(ranks.sum(found.sums()))
    figures = {**found.result(), "users": float(found.count)}
    if own.metrics:
        mine = [torch.cat(all_places)]
        everyone = [mine] if ranks.everybody is None else ranks.everybody.share(mine)
        figures |= own.figures(torch.cat([part for (part,) in everyone]))
    return Evaluation(
        figures | describe_held_out(store, recipe, which, ranks), slices.result(ranks)
    )


@dataclass(frozen=True)
class CatalogueQueries:
    """Queries that share one pass over the catalogue, and the sizes of their batches."""

    queries_SD: torch.Tensor
    targets_S: torch.Tensor  # row of the item that followed
    users_S: torch.Tensor
    known_S: torch.Tensor  # how many behaviours of the user's log the query may know
    sizes: list[int]

    def tiles(self) -> Iterator[torch.Tensor]:
        """Yield places whose figures are added up together: a batch, or a part of a large one."""
        for places in torch.arange(len(self.targets_S)).split(self.sizes):
            yield from places.split(QUERY_TILE)


def group_queries(
    recommender: Recommends, batches: Iterator[JaggedBatch], ranks: Ranks
) -> Iterator[CatalogueQueries]:
    """Yield the queries of as many batches as memory allows. Collective: all ranks agree."""
    waiting: list[tuple[torch.Tensor, ...]] = []
    for batch in batches:
        targets_S = batch.next_items_T[batch.supervised_T]
        waiting.append((recommender.queries_SD(batch), targets_S, *supervised_places(batch)))
        full = sum(int(known_S.sum()) + len(known_S) for *_, known_S in waiting) > SEEN_A_PASS
        if ranks.sum([float(full)])[0] > 0:
            yield _join(waiting)
            waiting = []
    if waiting:
        yield _join(waiting)


def _join(waiting: list[tuple[torch.Tensor, ...]]) -> CatalogueQueries:
    queries_SD, targets_S, users_S, known_S = (
        torch.cat(each) for each in zip(*waiting, strict=True)
    )
    sizes = [len(targets) for _, targets, *_ in waiting]
    return CatalogueQueries(queries_SD, targets_S, users_S, known_S, sizes)


def target_places(
    recommender: Recommends, store: SequenceStore, recipe: Recipe, queries: CatalogueQueries
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the items that score above each target, and those that tie (int64 [S] each).

    By `repeat: exclude` seen items do not compete, and a target among them is missed. Nothing as
    large as the catalogue's rows or scores is held. Collective.
    """
    target_SD = recommender.item_vectors_CD(queries.targets_S)
    scores_S = score_pairs(queries.queries_SD, target_SD)
    seen = None
    if recipe.repeat == "exclude":
        seen = seen_pairs(store, queries.users_S, queries.known_S)
    above_S, tied_S = count_rivals(
        queries.queries_SD,
        recommender.catalogue_tiles(),
        queries.targets_S,
        scores_S,
        None if seen is None else Pairs(*seen),
    )
    if seen is None:
        return above_S, tied_S
    missed_S = seen.contains(queries.targets_S)
    return above_S.masked_fill(missed_S, metrics.MISSED), tied_S.masked_fill(missed_S, 0)


def sampled_negatives(
    store: SequenceStore, user: int, trained: int, *, seed: int, count: int = 100
) -> torch.Tensor:
    """Draw SASRec's negatives: uniform over the catalogue without the user's *training* items.

    These are the first `trained` of the log. The target may be drawn again.
    """
    start = int(store.offsets_U1[user])
    excluded = torch.from_numpy(np.unique(store.items_N[start : start + trained]))
    if excluded.numel() == store.num_items:
        raise ValueError(
            f"user row {user} has every item in training: there is no negative to draw"
        )
    kept = torch.empty(0, dtype=torch.int64)
    attempt = 0
    while kept.numel() < count:
        drawn = random_integers(
            derive_seed(seed, attempt), torch.tensor([user]), 4 * count, store.num_items
        ).flatten()
        kept = torch.cat([kept, drawn[~torch.isin(drawn, excluded)]])
        attempt += 1
    return kept[:count]


def evaluate_sampled(
    recommender: Recommends, store: SequenceStore, recipe: Recipe, which: Which, seed: int = 0
) -> dict[str, float]:
    """Compute SASRec's sampled protocol: the target's place among itself and 100 negatives.

    For comparison with old tables: it flatters weak models.
    """
    found = metrics.RankingMetrics(ks=(1, 5, 10))
    train_U = recipe.split.train_lengths(store)
    # Of a user who does not train at all, what comes before the held-out part.
    trained_U = np.where(train_U > 0, train_U, recipe.split.held_out(store, which).begins_U)
    with torch.no_grad():
        for batch in _batches(store, recipe, which):
            users_S, _ = supervised_places(batch)
            negatives_SC = torch.stack(
                [
                    sampled_negatives(store, user, int(trained_U[user]), seed=seed)
                    for user in users_S.tolist()
                ]
            )
            candidates_SC = torch.cat(
                [batch.next_items_T[batch.supervised_T].unsqueeze(1), negatives_SC], dim=1
            )
            vectors_PD = recommender.item_vectors_CD(candidates_SC.flatten())
            vectors_SCD = vectors_PD.unflatten(0, candidates_SC.shape)
            scores_SC = (vectors_SCD @ recommender.queries_SD(batch).unsqueeze(2)).squeeze(2)
            target_S = torch.zeros(len(users_S), dtype=torch.int64)
            found.add(*metrics.target_places(scores_SC, target_S))
    return {**found.result(), "users": float(found.count)}


def evaluate_ranking(
    recommender: Recommends,
    batches: Iterator[JaggedBatch],
    store: SequenceStore,
    recipe: Recipe,
    which: Which,
    ranks: Ranks = ALONE,
) -> dict[str, float]:
    """Compute AUC, GAUC and NE of every task over the held-out behaviours, and their means.

    The baseline scores a behaviour by its item's mean label in training; NE has none, because it
    compares with the base rate by itself.
    """
    predicted, labels, users, items = [], [], [], []
    for batch in batches:
        predicted.append(recommender.predict_SA(batch))
        labels.append(labels_TA(recipe, batch, torch.float32)[batch.supervised_T])
        users.append(supervised_places(batch)[0])
        items.append(batch.items_T[batch.supervised_T])
    mine = [torch.cat(part) if part else torch.empty(0) for part in (predicted, labels)]
    mine += [
        torch.cat(part) if part else torch.empty(0, dtype=torch.int64) for part in (users, items)
    ]
    everyone = [mine] if ranks.everybody is None else ranks.everybody.share(mine)
    predicted_SA, labels_SA, users_S, items_S = (
        torch.cat(parts) for parts in zip(*everyone, strict=True)
    )
    result: dict[str, float] = {}
    rates_NA = action_rates(store, recipe)
    for column, task in enumerate(recipe.tasks if users_S.numel() else ()):
        scores_S, truth_S = predicted_SA[:, column], labels_SA[:, column]
        rates_S = rates_NA[items_S, column]
        result |= {
            f"AUC/{task}": metrics.area_under_curve(scores_S, truth_S),
            f"GAUC/{task}": metrics.grouped_area_under_curve(scores_S, truth_S, users_S),
            f"NE/{task}": metrics.normalised_entropy(scores_S, truth_S),
            f"{BASELINE}AUC/{task}": metrics.area_under_curve(rates_S, truth_S),
            f"{BASELINE}GAUC/{task}": metrics.grouped_area_under_curve(rates_S, truth_S, users_S),
        }
    for kind in ("AUC", "GAUC", "NE", f"{BASELINE}AUC", f"{BASELINE}GAUC"):
        result[kind] = _mean_over_tasks(result, kind)
    defined = {
        name: value for name, value in result.items() if value == value
    }  # a figure with one class only is left out
    counted = {"behaviours": float(users_S.numel()), "users": float(users_S.unique().numel())}
    return defined | counted | describe_held_out(store, recipe, which, ranks)


def _mean_over_tasks(figures: dict[str, float], kind: str) -> float:
    known = [v for name, v in figures.items() if name.startswith(f"{kind}/") and v == v]
    return sum(known) / len(known) if known else float("nan")
