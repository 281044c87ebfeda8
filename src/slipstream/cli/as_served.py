"""`slipstream evaluate --as-served`: the metrics of what a running server really answers.

Every held-out behaviour is asked for over HTTP at its moment, with the user's history by value; the
place of its item in the answer goes to the same metric code as an offline evaluation. Touch this
when a server should be measured in another way.
"""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from slipstream.data.store import SequenceStore
from slipstream.errors import SlipstreamError
from slipstream.serving.http.client import AsyncClient
from slipstream.serving.http.messages import MAX_BEHAVIOURS, HistoryMessage, RecommendAnswer
from slipstream.training.export import export_recommender
from slipstream.training.held_out import HeldOut, Which, describe_held_out, held_out_behaviours
from slipstream.training.metrics import KS, MISSED, RankingMetrics
from slipstream.training.recipe import Recipe
from slipstream.training.recommender import Recommender

CONCURRENCY = 8
DEADLINE_MS = 60_000.0  # a measurement waits where a user would not
Progress = Callable[[int, int], None]


def evaluate_as_served(
    url: str,
    recipe: Recipe,
    store: SequenceStore,
    recommender: Recommender,
    split: Which = "test",
    *,
    key: str | None = None,
    repeat: Literal["exclude", "allow"] | None = None,
    hide_request_time: bool = False,
    progress: Progress = lambda done, total: None,
) -> tuple[dict[str, float], str]:
    """Return the figures of a server that serves this run, and its model's version."""
    if recipe.task != "retrieval":
        raise SlipstreamError(
            "--as-served measures recommendations, so it needs a retrieval run; leave it out"
        )
    held_out = held_out_behaviours(store, recipe, split)
    if not len(held_out):
        raise SlipstreamError("no user has a held-out behaviour, so there is nothing to ask for")
    more: dict[str, Any] = {} if repeat is None else {"keep_seen": repeat == "allow"}
    timed = recipe.model.time_bias == "next" and store.meta.get("timed", True)
    asks = HeldOutRequests(store, recipe, held_out, more, timed and not hide_request_time)
    own = exported_version(recommender, store)
    above_S = asyncio.run(_ask_all(url, key, asks, own, progress))
    found = RankingMetrics()
    found.add(above_S, torch.zeros_like(above_S))
    asked = recipe.model_copy(update={"repeat": repeat or recipe.repeat})
    about = describe_held_out(store, asked, split)
    return {**found.result(), "users": float(found.count), **about}, own


def exported_version(recommender: Recommender, store: SequenceStore) -> str:
    """Return the version that an exported bundle of this recommender has."""
    with tempfile.TemporaryDirectory() as place:
        return export_recommender(recommender, store, Path(place) / "bundle")


class HeldOutRequests:
    """Makes the request of each held-out behaviour, in original ids."""

    def __init__(
        self,
        store: SequenceStore,
        recipe: Recipe,
        held_out: HeldOut,
        more: dict[str, Any],
        with_time: bool,
    ) -> None:
        self._store, self._recipe, self.held_out = store, recipe, held_out
        self._more, self._with_time = more, with_time

    def request(self, place: int) -> tuple[str, dict[str, Any]]:
        """Return the user, and the rest of the request."""
        store = self._store
        user, known = int(self.held_out.users_S[place]), int(self.held_out.known_S[place])
        end = int(store.offsets_U1[user]) + known
        log = slice(end - min(known, MAX_BEHAVIOURS), end)
        history = HistoryMessage(
            [store.items.id(row) for row in store.items_N[log].tolist()],
            store.timestamps_N[log].tolist(),
            {name: values_N[log].tolist() for name, values_N in store.actions.items()},
            {name: self._labels(name, log) for name in self._recipe.context_features},
        )
        features = {name: store.user_features[name].at(user) for name in self._recipe.user_features}
        more = {"request_time": int(self.held_out.times_S[place])} if self._with_time else {}
        return str(store.users.id(user)), {
            "history": history,
            "features": features,
            "retrieve": max(KS),
            "allow_truncate": True,  # the window is the model's, a longer history is no mistake
            **self._more,
            **more,
        }

    def _labels(self, name: str, log: slice) -> list[str | None]:
        """Return labels of context, None where one is not known."""
        column = self._store.context[name]
        return [column.labels[int(code)].as_py() or None for code in column.codes[log]]

    def items_above(self, place: int, answer: RecommendAnswer) -> int:
        """Return how many items the answer has before the held-out one."""
        target = self._store.items.id(int(self.held_out.items_S[place]))
        items: list[Any] = list(answer.items)
        return items.index(target) if target in items else MISSED


async def _ask_all(
    url: str, key: str | None, asks: HeldOutRequests, version: str, progress: Progress
) -> torch.Tensor:
    """Ask for every held-out behaviour, a few at a time; return the items above each."""
    total = len(asks.held_out)
    above_S = torch.full((total,), MISSED, dtype=torch.int64)
    places, done = iter(range(total)), 0

    async def work(client: AsyncClient) -> None:
        nonlocal done
        for place in places:
            user, more = asks.request(place)
            answer = await client.recommend(user, max(KS), **more)
            if answer.version != version:
                raise SlipstreamError(
                    f"{url} serves version {answer.version}, but this run is version {version}; "
                    "export the run and serve that bundle, or evaluate the run that is served"
                )
            if answer.truncated:
                raise SlipstreamError(
                    f"{url} had no time for the whole history of user '{user}', so its answers are "
                    "not those of a quiet server; measure it while it has less to do"
                )
            above_S[place] = asks.items_above(place, answer)
            done += 1
            progress(done, total)

    async with AsyncClient(url, key, deadline_ms=DEADLINE_MS, connections=CONCURRENCY) as client:
        workers = [asyncio.ensure_future(work(client)) for _ in range(min(CONCURRENCY, total))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    return above_S
