"""What a trained recommender answers: recommendations, scores, vectors, similar items.

Everything is rows of the store's vocabularies; callers translate original ids. Each function takes
many users at once. A user is asked for at a moment: after the whole log, or after its first `known`
behaviours, at a request time or at the last behaviour's own time. The recipe's rules `repeat` and
`window` hold as in evaluation. Touch this to change what `slipstream recommend` answers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from slipstream.data.batch import JaggedBatch
from slipstream.data.store import Feature, SequenceStore
from slipstream.data.windows import cut_windows
from slipstream.errors import SlipstreamError
from slipstream.history.user_history import History
from slipstream.history.window import window_start
from slipstream.ops.row_readers import normalize_rows
from slipstream.ops.tiled_search import NO_ROW, Pairs, TopRows, top_k_of_tiles
from slipstream.training.recommender import Recommender
from slipstream.training.seen import SeenPairs, seen_pairs

CANDIDATE_TILE = 2048  # candidates ranked at once
USER_TILE = 256  # users whose histories the model reads at once
USERS_A_PASS = 16_384  # users who share one pass over the catalogue, unless their logs are long
SEEN_A_PASS = 1 << 22  # behaviours of their logs
Rows = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class Recommendation:
    """Items for one user, best first, and the behaviours the model saw, oldest first."""

    user: int
    items: list[int]
    scores: list[float]
    history: list[int]


@dataclass(frozen=True)
class Moments:
    """Who is asked for and when: rows of users, how many behaviours are known, request times."""

    users_B: np.ndarray
    known_B: np.ndarray
    times_B: np.ndarray | None = None

    def tiles(self, size: int) -> Iterator["Moments"]:
        """Yield `size` of them at a time."""
        for start in range(0, self.users_B.size, size):
            part = slice(start, start + size)
            times_B = None if self.times_B is None else self.times_B[part]
            yield Moments(self.users_B[part], self.known_B[part], times_B)

    def passes(self) -> Iterator["Moments"]:
        """Yield as many as can share one pass over the catalogue."""
        groups_B = np.maximum(
            np.arange(self.users_B.size) // USERS_A_PASS, np.cumsum(self.known_B) // SEEN_A_PASS
        )
        borders = np.flatnonzero(np.diff(groups_B)) + 1
        places = np.split(np.arange(self.users_B.size), borders) if self.users_B.size else []
        for part in places:
            times_B = None if self.times_B is None else self.times_B[part]
            yield Moments(self.users_B[part], self.known_B[part], times_B)


def moments(
    store: SequenceStore,
    users: Rows,
    known: Rows | None = None,
    request_times: Rows | None = None,
) -> Moments:
    """Check and complete who is asked for; unless given, a user's whole log is known."""
    users_B = np.asarray(users, dtype=np.int64).reshape(-1)
    lengths_B = store.lengths_U[users_B]
    known_B = lengths_B if known is None else np.asarray(known, dtype=np.int64)
    if (known_B > lengths_B).any():
        raise ValueError("a log has fewer behaviours than are said to be known")
    if (known_B < 1).any():
        raise SlipstreamError(
            "a user without behaviours cannot be asked for; give a history of at least one"
        )
    if request_times is None or not store.meta.get("timed", True):
        return Moments(users_B, known_B)
    times_B = np.asarray(request_times, dtype=np.int64)
    last_B = store.timestamps_N[store.offsets_U1[users_B] + known_B - 1]
    if (times_B < last_B).any():
        early = int(np.flatnonzero(times_B < last_B)[0])
        raise SlipstreamError(
            f"request time {times_B[early]} is before the user's last behaviour at "
            f"{last_B[early]}; give the time of the request in seconds"
        )
    return Moments(users_B, known_B, times_B)


def latest_behaviours(
    recommender: Recommender, store: SequenceStore, asked: Moments
) -> JaggedBatch:
    """Return the window of each user at the moment; its last behaviour asks for the next."""
    recipe = recommender.recipe
    starts = [
        window_start(known, recipe.sampler.max_len, rule=recipe.window)
        for known in asked.known_B.tolist()
    ]
    batch = cut_windows(
        store,
        asked.users_B,
        np.array(starts, dtype=np.int64),
        asked.known_B,
        asked.known_B,
        asked.known_B,
        recipe.task,
    )
    last_B = batch.offsets_B1[1:] - 1
    supervised_T = torch.zeros(batch.num_tokens, dtype=torch.bool)
    supervised_T[last_B] = True
    next_T = batch.next_timestamps_T.clone()
    if asked.times_B is not None:
        next_T[last_B] = torch.from_numpy(asked.times_B)
    if isinstance(store, GivenHistories):
        batch = replace(batch, sample_ids_B=torch.from_numpy(store.rows_B[asked.users_B]))
    return replace(batch, supervised_T=supervised_T, next_timestamps_T=next_T)


@torch.no_grad()
def recommend(
    recommender: Recommender,
    store: SequenceStore,
    users: Rows,
    count: int = 10,
    *,
    repeat: str | None = None,
    known: Rows | None = None,
    request_times: Rows | None = None,
    allowed_N: np.ndarray | None = None,
) -> list[Recommendation]:
    """Return the `count` best items for each user.

    `repeat` overrides the recipe's rule: `exclude` leaves out every item of the known log. Only
    items that `allowed_N` marks (bool, one per item) are recommended, where it is given.
    """
    exclude = (repeat or recommender.recipe.repeat) == "exclude"
    allowed = None if allowed_N is None else torch.from_numpy(np.asarray(allowed_N, bool))
    search = _search_ranking if recommender.recipe.task == "ranking" else _search_catalogue
    answers = []
    for group in moments(store, users, known, request_times).passes():
        excluded = Pairs(*_seen(store, group)) if exclude else None
        best, histories = search(recommender, store, group, count, excluded, allowed)
        kept_B = (best.rows_SK != NO_ROW).sum(1).tolist()
        for row, (user, kept) in enumerate(zip(group.users_B.tolist(), kept_B, strict=True)):
            answers.append(
                Recommendation(
                    user,
                    best.rows_SK[row, :kept].tolist(),
                    best.scores_SK[row, :kept].tolist(),
                    histories[row].tolist(),
                )
            )
    return answers


def recommend_user(
    recommender: Recommender, store: SequenceStore, user: int, count: int = 10, **more: object
) -> Recommendation:
    """Return the `count` best items for one user; `more` as `recommend` takes it."""
    return recommend(recommender, store, [user], count, **more)[0]  # type: ignore[arg-type]


def _seen(store: SequenceStore, asked: Moments) -> SeenPairs:
    return seen_pairs(store, torch.from_numpy(asked.users_B), torch.from_numpy(asked.known_B))


def _search_catalogue(
    recommender: Recommender,
    store: SequenceStore,
    asked: Moments,
    count: int,
    excluded: Pairs | None,
    allowed_N: torch.Tensor | None,
) -> tuple[TopRows, list[torch.Tensor]]:
    """Retrieval: return the best items of every user in one pass, and what the model saw."""
    queries, histories = [], []
    for tile in asked.tiles(USER_TILE):
        batch = latest_behaviours(recommender, store, tile)
        queries.append(recommender.queries_SD(batch))
        histories += batch.items_T.split(batch.lengths_B.tolist())
    best = top_k_of_tiles(
        torch.cat(queries),
        recommender.catalogue_tiles(),
        min(count, recommender.features.num_items),
        excluded=excluded,
        allowed_N=allowed_N,
    )
    return best, histories


def _search_ranking(
    recommender: Recommender,
    store: SequenceStore,
    asked: Moments,
    count: int,
    excluded: Pairs | None,
    allowed_N: torch.Tensor | None,
) -> tuple[TopRows, list[torch.Tensor]]:
    """Ranking: return the best items by the first task, every item a candidate."""
    parts, histories = [], []
    every_item = torch.arange(recommender.features.num_items)
    for place, tile in enumerate(asked.tiles(1)):
        batch = latest_behaviours(recommender, store, tile)
        scores_N = candidate_scores(recommender, batch, every_item)[:, 0]
        if excluded is not None:
            scores_N[excluded.rows_P[excluded.queries_P == place]] = -torch.inf
        if allowed_N is not None:
            scores_N[~allowed_N] = -torch.inf
        best = scores_N.topk(min(count, scores_N.numel()))
        none = best.values.isneginf()
        parts.append(TopRows(best.values, best.indices.masked_fill(none, NO_ROW)))
        histories.append(batch.items_T)
    return TopRows(*(torch.stack(part) for part in zip(*parts, strict=True))), histories


@torch.no_grad()
def score(
    recommender: Recommender,
    store: SequenceStore,
    users: Rows,
    items: np.ndarray | Sequence[int],
    *,
    known: Rows | None = None,
    request_times: Rows | None = None,
    context: Mapping[str, int] | None = None,
) -> dict[str, torch.Tensor]:
    """Score items for each user: [B, C] by task; `items` are C rows for all, or [B, C].

    A retrieval model has one task, called `score`; a ranking model gives probabilities. `context`
    has codes of the request, which a ranking model reads with the items.
    """
    asked = moments(store, users, known, request_times)
    items_BC = torch.from_numpy(np.asarray(items, dtype=np.int64))
    items_BC = items_BC.expand(asked.users_B.size, items_BC.shape[-1])
    parts, start = [], 0
    ranking = recommender.recipe.task == "ranking"
    for tile in asked.tiles(1 if ranking else USER_TILE):
        mine_BC = items_BC[start : start + tile.users_B.size]
        start += tile.users_B.size
        batch = latest_behaviours(recommender, store, tile)
        if ranking:
            scores_CA = candidate_scores(recommender, batch, mine_BC[0], context)
            parts.append(scores_CA.unsqueeze(0))
        else:
            queries_BD1 = recommender.queries_SD(batch).unsqueeze(2)
            vectors_BCD = recommender.item_vectors_CD(mine_BC.flatten()).unflatten(0, mine_BC.shape)
            parts.append(vectors_BCD @ queries_BD1)
    names = tuple(recommender.recipe.tasks) if ranking else ("score",)
    scores_BCA = torch.cat(parts) if parts else torch.empty(0, items_BC.shape[1], len(names))
    return {name: scores_BCA[:, :, column] for column, name in enumerate(names)}


def candidate_scores(
    recommender: Recommender,
    history: JaggedBatch,
    items_C: torch.Tensor,
    context: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """Ranking: return every task's probability for items after one user's history [C, A].

    `context` has codes of the request, by context column; an absent one is unknown.
    """
    parts = []
    for items in items_C.split(CANDIDATE_TILE):
        count = items.numel()
        now = history.next_timestamps_T[-1:].expand(count)
        batch = replace(
            history,
            offsets_B1=torch.tensor([0, history.num_tokens + count]),
            items_T=torch.cat([history.items_T, items]),
            timestamps_T=torch.cat([history.timestamps_T, now]),
            next_items_T=torch.cat([history.next_items_T, torch.full((count,), -1)]),
            next_timestamps_T=torch.cat([history.next_timestamps_T, now]),
            supervised_T=torch.arange(history.num_tokens + count) >= history.num_tokens,
            actions={
                name: torch.cat([values, torch.zeros(count)])
                for name, values in history.actions.items()
            },
            context={
                name: torch.cat([codes, codes.new_full((count,), (context or {}).get(name, 0))])
                for name, codes in history.context.items()
            },
        )
        parts.append(recommender.predict_SA(batch, torch.tensor([count])))
    return torch.cat(parts)


@torch.no_grad()
def user_vectors(
    recommender: Recommender,
    store: SequenceStore,
    users: Rows,
    *,
    known: Rows | None = None,
    request_times: Rows | None = None,
) -> torch.Tensor:
    """Return each user's query [B, D]; its product with `item_vectors` is the score."""
    if recommender.recipe.task == "ranking":
        raise SlipstreamError(
            "a ranking run scores a user and an item together, so it has no vector of a user; use "
            "score, or a retrieval run"
        )
    parts = [
        recommender.queries_SD(latest_behaviours(recommender, store, tile))
        for tile in moments(store, users, known, request_times).tiles(USER_TILE)
    ]
    return torch.cat(parts) if parts else torch.empty(0, recommender.recipe.model.dim)


def item_vectors(recommender: Recommender, items: Rows | None = None) -> torch.Tensor:
    """Return the embeddings of items [C, D], or of the whole catalogue."""
    if items is None:
        return recommender.catalogue_ND()
    return recommender.item_vectors_CD(torch.from_numpy(np.asarray(items, dtype=np.int64)))


def similar_items(
    recommender: Recommender, items: Rows, count: int = 10
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and cosines [C, count] of the items nearest to each item, itself left out."""
    rows_C = torch.from_numpy(np.asarray(items, dtype=np.int64))
    count = min(count, recommender.features.num_items - 1)
    directions_CD = normalize_rows(recommender.item_vectors_CD(rows_C))
    tiles = ((begin, normalize_rows(tile)) for begin, tile in recommender.catalogue_tiles())
    itself = Pairs(torch.arange(rows_C.numel()), rows_C)
    best = top_k_of_tiles(directions_CD, tiles, count, excluded=itself)
    return best.rows_SK, best.scores_SK


class GivenHistories(SequenceStore):
    """A store in memory whose user b has the behaviours `histories[b]`.

    The histories hold rows of the items of `store`, which this one shares. An absent action counts
    as 0, absent context as unknown. User features come from the history, else from row `users[b]`
    of the users of `store`, else (-1, or no `users`) they are unknown.
    """

    def __init__(
        self, store: SequenceStore, histories: Sequence[History], users: Rows | None = None
    ) -> None:
        self.__dict__.update(vars(store))
        self.offsets_U1 = np.cumsum([0, *(len(history) for history in histories)])
        self.items_N = _joined([history.items for history in histories], np.int64)
        self.timestamps_N = _joined([history.timestamps for history in histories], np.int64)
        if not store.meta.get("timed", True):
            self.timestamps_N = np.zeros_like(self.timestamps_N)
        self.actions = {
            name: _joined([_action(history, name) for history in histories], np.float32)
            for name in store.actions
        }
        self.context = {
            name: replace(column, codes=_context_codes(name, column, histories))
            for name, column in store.context.items()
        }
        rows_B = np.full(len(histories), -1) if users is None else np.asarray(users, np.int64)
        self.rows_B: np.ndarray = rows_B  # of the vocabulary of users
        self.user_features = {
            name: replace(feature, codes=_given_codes(name, feature, histories, rows_B))
            for name, feature in store.user_features.items()
            if feature.kind == "category"
        }


def _action(history: History, name: str) -> np.ndarray:
    return np.asarray(history.actions.get(name, np.zeros(len(history))))


def _context_codes(name: str, column: Feature, histories: Sequence[History]) -> np.ndarray:
    """Return the codes of the labels that histories give; unknown are code 0."""
    code_of = {label: code for code, label in enumerate(column.labels.to_pylist())}
    parts = [
        [code_of.get(label, 0) for label in history.context.get(name, [""] * len(history))]
        for history in histories
    ]
    return _joined(parts, np.int32)


def _given_codes(
    name: str, feature: Feature, histories: Sequence[History], rows_B: np.ndarray
) -> np.ndarray:
    known_B = np.where(rows_B >= 0, feature.codes[rows_B], 0)
    pairs = zip(histories, known_B.tolist(), strict=True)
    return np.array([each.user_features.get(name, code) for each, code in pairs], dtype=np.int64)


def _joined(parts: Sequence[object], dtype: type) -> np.ndarray:
    arrays: list[np.ndarray] = [np.asarray(part, dtype=dtype) for part in parts]
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype)
