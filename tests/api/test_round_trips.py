"""Ids of every type come back as they went in, from prepare to the answers of a bundle."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import slipstream as ss
from tests.support.api_runs import IDS, TINY, prepare_and_train, shop_frame

pytestmark = pytest.mark.system  # whole runs: too long for a unit test

INTEGERS = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=256).filter(
    lambda text: text.strip() != ""
)
KINDS = sorted(IDS)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> dict[str, tuple[ss.Run, ss.BundleModel]]:
    """A run and its bundle for each type of id, trained once."""
    found = {}
    for kind in KINDS:
        run = prepare_and_train(tmp_path_factory.mktemp(kind), kind)
        bundle = ss.load(run.export(run.directory.parent / "bundle"), data=run.store)
        assert isinstance(bundle, ss.BundleModel)
        found[kind] = run, bundle
    return found


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_question_is_answered_in_the_ids_it_was_asked_in(pairs, data):
    kind = data.draw(st.sampled_from(KINDS))
    users, items = IDS[kind]
    asked = data.draw(st.lists(st.sampled_from(users), min_size=1, max_size=5))
    candidates = data.draw(st.lists(st.sampled_from(items), min_size=1, max_size=5))
    history = data.draw(st.lists(st.sampled_from(items), min_size=1, max_size=8))
    k = data.draw(st.integers(1, 15))
    run, bundle = pairs[kind]
    answers = []
    for model in (run, bundle):
        best = model.recommend(asked, k, repeat="allow")
        assert best["user"].to_list() == [user for user in asked for _ in range(min(k, len(items)))]
        assert set(best["item"]) <= set(items)
        scored = model.score(asked, candidates)
        assert scored["user"].to_list() == [user for user in asked for _ in candidates]
        assert scored["item"].to_list() == candidates * len(asked)
        by_hand = model.recommend(histories=history, k=k)
        assert set(by_hand["item"]) <= set(items) - set(history)
        near = model.similar_items(candidates[0], k)
        assert set(near["item"]) <= set(items) - {candidates[0]}
        assert model.user_vectors(asked)["user"].to_list() == asked
        assert model.item_vectors(candidates)["item"].to_list() == candidates
        answers.append((best, scored, by_hand, near))
    for ours, theirs in zip(*answers, strict=True):
        assert ours.drop("score").equals(theirs.drop("score"))
        np.testing.assert_allclose(ours["score"], theirs["score"], atol=1e-5)


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from([INTEGERS, TEXTS]).flatmap(
        lambda ids: st.tuples(
            st.lists(ids, min_size=4, max_size=6, unique=True),
            st.lists(ids, min_size=9, max_size=12, unique=True),
        )
    )
)
def test_any_ids_survive_the_whole_way(both):
    users, items = both
    with tempfile.TemporaryDirectory() as place:
        store = ss.prepare(
            shop_frame(users, items),
            Path(place, "store"),
            user="customer",
            item="sku",
            time="when",
            quiet=True,
        )
        assert {store.users.id(row) for row in range(store.num_users)} == set(users)
        seen = {store.items.id(row) for row in range(store.num_items)}
        assert seen <= set(items)
        settings = TINY | {"train": {"max_steps": 1, "threads": 1, "tensorboard": False}}
        run = ss.train(store, out=Path(place, "run"), quiet=True, **settings)
        bundle = ss.BundleModel(run.export(Path(place, "bundle")), store)
        for model in (run, bundle):
            found = model.recommend(users, k=len(items), repeat="allow")
            assert found["user"].to_list() == [user for user in users for _ in seen]
            assert set(found["item"]) == seen
            assert model.similar_items(next(iter(seen)), 3)["item"].is_in(list(seen)).all()
