"""The synthetic log follows from its seed and has interests, popularity and lengths."""

import numpy as np
import pytest

from slipstream.data.preparation import Choices, prepare
from slipstream.data.synthetic import Synthetic, draw_lengths, with_lengths


def test_synthetic_is_seeded_and_has_what_it_promises(tmp_path):
    shape = Synthetic(users=300, items=400, topics=20, seed=4)
    store = prepare("synthetic", tmp_path / "a", Choices(synthetic=shape))
    assert store.digest == prepare("synthetic", tmp_path / "b", Choices(synthetic=shape)).digest
    assert (
        store.digest
        != prepare(
            "synthetic",
            tmp_path / "c",
            Choices(synthetic=Synthetic(users=300, items=400, topics=20, seed=5)),
        ).digest
    )
    assert store.num_users == 300 and store.lengths_U.min() >= 5
    topic_N = store.item_features["topic"].codes[store.items_N]
    shares = []
    for user in range(store.num_users):
        counts = np.sort(np.bincount(topic_N[store.offsets_U1[user] : store.offsets_U1[user + 1]]))[
            ::-1
        ]
        shares.append(counts[:3].sum() / counts.sum())
    assert np.mean(shares) > 0.8  # lasting interests: three of twenty topics
    counts_V = np.sort(np.bincount(store.items_N, minlength=store.num_items))[::-1]
    assert counts_V[:20].sum() > 0.25 * store.num_behaviours  # popularity is far from even
    assert store.actions["like"].sum() < store.actions["click"].sum() < store.num_behaviours
    assert (store.actions["like"] <= store.actions["click"]).all()


def test_kuairand_lengths_fit_the_published_median(tmp_path):
    shape = with_lengths(Synthetic(), "kuairand-1k")
    lengths = draw_lengths(shape, 50_000, np.random.default_rng(0))
    assert np.median(lengths) == pytest.approx(np.exp(8.125), rel=0.03)
    assert lengths.min() >= 10 and lengths.max() == 49_332
