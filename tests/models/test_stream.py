"""The token stream equals lists built behaviour by behaviour: order, times, ids and places."""

import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from slipstream.models.inputs import ModelInput
from slipstream.models.stream import lay_out
from tests.support.models_samples import given

# (history, candidates) of each sequence
SHAPES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=4)


def expected_tokens(batch: ModelInput, shapes, users, actions, time_bias):
    """(row, time, look-back time, id or None) of every token, and every behaviour's place."""
    tokens, places, t = [], [], 0
    for b, (history, candidates) in enumerate(shapes):
        tokens += [(rows[b], 0, 0, None) for rows in users]
        for place in range(history + candidates):
            own, following = int(batch.timestamps_T[t]), int(batch.next_timestamps_T[t])
            name, past = int(batch.token_ids_T[t]), place < history
            looks = following if time_bias == "next" and past else own
            places.append(len(tokens))
            if actions is None:
                tokens.append((batch.rows["item"][t], own, looks, name))
            else:
                tokens.append((batch.rows["item"][t], own, own, 2 * name))
                tokens += [(actions[t], own, looks, 2 * name + 1)] if past else []
            t += 1
    return tokens, places


@settings(max_examples=60, deadline=None)
@drawn(SHAPES, st.integers(0, 2), st.booleans(), st.sampled_from(["own", "next"]))
def test_streams_hold_every_token_in_its_place(shapes, num_users, with_actions, time_bias):
    batch = given([h + c for h, c in shapes], [c for _, c in shapes], dim=3)
    generator = torch.Generator().manual_seed(1)
    users = [
        torch.randn(len(shapes), 3, generator=generator, dtype=torch.float64)
        for _ in range(num_users)
    ]
    actions = (
        torch.randn(batch.timestamps_T.numel(), 3, generator=generator, dtype=torch.float64)
        if with_actions
        else None
    )
    stream = lay_out(batch, batch.rows["item"], time_bias, users, actions)
    tokens, places = expected_tokens(batch, shapes, users, actions, time_bias)
    layout = stream.layout
    assert layout.offsets_B1[-1] == len(tokens)
    assert layout.offsets_B1.diff().tolist() == [
        num_users + h * (2 if with_actions else 1) + c for h, c in shapes
    ]
    for at, (row, time, looks, name) in enumerate(tokens):
        assert torch.equal(stream.x_SD[at], row)
        assert (int(layout.timestamps_T[at]), int(layout.query_timestamps_T[at])) == (time, looks)
        assert name is None or int(layout.token_ids_T[at]) == name
    assert torch.equal(stream.behaviours(stream.x_SD), stream.x_SD[places])
    assert len(set(layout.token_ids_T.tolist())) >= len(tokens) - num_users * sum(
        h + c == 0 for h, c in shapes
    )


def test_user_tokens_of_one_sequence_have_ids_of_their_own():
    batch = given([3, 2])
    users = [torch.zeros(2, 8, dtype=torch.float64)] * 2
    names = lay_out(batch, batch.rows["item"], "own", users).layout.token_ids_T
    assert len(set(names.tolist())) == 9


@drawn(st.integers(0, 5), st.integers(0, 3), st.booleans(), st.sampled_from(["own", "next"]))
@settings(deadline=None, max_examples=50)
def test_one_sequence_without_gradients_is_laid_out_alike(history, candidates, actions, time_bias):
    batch = given([history + candidates], [candidates] if candidates else None)
    rows_TD = batch.rows["item"]
    actions_TD = -rows_TD if actions else None
    slow = lay_out(batch, rows_TD, time_bias, (), actions_TD)
    with torch.no_grad():
        fast = lay_out(batch, rows_TD, time_bias, (), actions_TD)
    assert torch.equal(fast.x_SD, slow.x_SD)
    for name in ("offsets_B1", "timestamps_T", "query_timestamps_T", "token_ids_T"):
        assert torch.equal(getattr(fast.layout, name), getattr(slow.layout, name)), name
    hidden_SD = torch.arange(slow.x_SD.shape[0]).unsqueeze(1)
    assert torch.equal(fast.behaviours(hidden_SD), slow.behaviours(hidden_SD))
