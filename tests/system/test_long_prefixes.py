"""Prefixes of 8,192 and 16,384 behaviours are exact through several layers, however computed.

With one layer a prefill attends to nothing, so only two and more show that cached keys and values
carry what earlier layers saw.
"""

from dataclasses import replace

import numpy as np
import pytest

from slipstream.history.user_history import History
from slipstream.serving.http.client import Client
from tests.support.serve_command import KEY, served
from tests.support.served_scores import as_message, full_pass
from tests.support.serving_samples import candidates, cut, engine, history, largest_difference


def without_one(whole: History, place: int, end: int) -> History:
    """The first `end` behaviours but one."""
    places = np.r_[0:place, place + 1 : end]
    actions = {name: values[places] for name, values in whole.actions.items()}
    return History(whole.items[places], whole.timestamps[places], actions, whole.user_features)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["retrieval", "ranking"])
@pytest.mark.parametrize(
    ("length", "blocks", "time_bias"), [(8_192, 3, "next"), (8_192, 2, "own"), (16_384, 2, "own")]
)
def test_long_prefixes_are_exact_through_layers(tmp_path, task, length, blocks, time_bias):
    settings = {"max_len": 16_384, "blocks": blocks, "position_embedding": False}
    served = engine(tmp_path, "hstu", task, time_bias, **settings)
    whole, items, cached = history(length), candidates(20), length - 30
    full = served.rank(None, whole, items)
    prefix = served.prefill(cut(whole, 0, cached))
    assert largest_difference(served.rank(prefix, cut(whole, cached), items), full) == 0
    half = served.prefill(cut(whole, 0, length // 2))
    grown = served.prefill(cut(whole, 0, cached), past=half)
    assert largest_difference(served.rank(grown, cut(whole, cached), items), full) == 0
    dropped = served.prefill(without_one(whole, 100, cached))
    assert largest_difference(served.rank(dropped, cut(whole, cached), items), full) > 1e-7


@pytest.mark.slow
def test_long_prefixes_are_exact_through_the_server(tmp_path):
    settings = {"max_len": 16_384, "blocks": 2, "position_embedding": False}
    full = engine(tmp_path, "hstu", "ranking", "own", **settings)
    bundle = next(path for path in tmp_path.iterdir() if (path / "bundle.json").exists())
    flags = ("--device-mb", "256", "--host-mb", "64", "--no-trigger")
    items = candidates(20).tolist()
    with served(bundle, *flags) as (url, _), Client(url, KEY, deadline_ms=60_000) as client:
        for length in (8_192, 16_384):
            whole, user = history(length, age=0), f"u{length}"
            past = whole.timestamps - whole.timestamps[-1] + 1_700_000_000  # nothing of tomorrow
            whole = replace(whole, timestamps=past)
            for begin in range(0, length - 5, 4_096):
                sent = as_message(cut(whole, begin, min(begin + 4_096, length - 5)))
                client.events(user, sent.items, sent.timestamps, actions=sent.actions)
            early = client.preinfer(user, rank_in_ms=20_000)
            last = as_message(cut(whole, length - 5))
            client.events(user, last.items, last.timestamps, actions=last.actions)
            late = client.rank(user, items, ticket=early.ticket)
            assert early.admitted and late.hit in ("device", "joined", "extended")
            assert late.behaviours == length
            assert late.scores == full_pass(full, whole, items)
            assert client.rank(user, items[:-1]).scores == full_pass(full, whole, items[:-1])
