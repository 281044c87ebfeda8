"""From behaviours to the token stream a backbone reads.

    [user tokens] behaviour_0 (action_0) behaviour_1 (action_1) … [candidates]

User features come first in each sequence as tokens of their own, with time 0. Where a model reads
actions, each behaviour is followed by its action token with the behaviour's time; candidates come
last and have no action. A token's id for dropout derives from its behaviour's id, so a sequence has
the same masks in any batch. Touch this when a stream gets another kind of token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from slipstream.models.inputs import Layout, ModelInput
from slipstream.models.jagged import offsets_from_lengths, sequence_and_place
from slipstream.models.model_config import TimeBias
from slipstream.ops.counter_random import mix64


@dataclass(frozen=True)
class Stream:
    """Tokens and their layout; `behaviour_T` is where each behaviour stands (None: as is)."""

    x_SD: torch.Tensor
    layout: Layout
    behaviour_T: torch.Tensor | None

    def behaviours(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """The rows of the behaviours' own tokens."""
        return (
            hidden_SD if self.behaviour_T is None else hidden_SD.index_select(0, self.behaviour_T)
        )


def token_rows(rows: dict[str, torch.Tensor], names: Sequence[str], factor: float) -> torch.Tensor:
    """The sum of several features' rows, times `factor`."""
    missing = [name for name in names if name not in rows]
    if missing:
        raise ValueError(
            f"the model was built with '{missing[0]}', but no rows of that name were given"
        )
    total = rows[names[0]]
    for name in names[1:]:
        total = total + rows[name]
    return total * factor


def lay_out(
    given: ModelInput,
    behaviours_TD: torch.Tensor,
    time_bias: TimeBias,
    users: Sequence[torch.Tensor] = (),
    actions_TD: torch.Tensor | None = None,
) -> Stream:
    """The stream of one batch; `users` are [B, D] each, `actions_TD` has a row per behaviour."""
    if given.offsets_B1.numel() == 2 and not users and not torch.is_grad_enabled():
        return _lay_out_one(given, behaviours_TD, time_bias, actions_TD)
    sequence_T, place_T = sequence_and_place(given.offsets_B1)
    lengths_B = given.offsets_B1.diff()
    history_B = lengths_B if given.num_candidates_B is None else lengths_B - given.num_candidates_B
    in_history_T = place_T < history_B[sequence_T]
    looks_from_T = torch.where(in_history_T, given.next_timestamps_T, given.timestamps_T)
    layout = Layout(
        offsets_B1=given.offsets_B1,
        timestamps_T=given.timestamps_T,
        query_timestamps_T=looks_from_T if time_bias == "next" else given.timestamps_T,
        token_ids_T=given.token_ids_T,
        dropout_seed=given.dropout_seed,
        num_candidates_B=given.num_candidates_B,
    )
    if not users and actions_TD is None:
        return Stream(behaviours_TD, layout, None)
    stride = 1 if actions_TD is None else 2
    offsets_B1 = offsets_from_lengths(len(users) + lengths_B + (stride - 1) * history_B)
    steps_T = place_T + (stride - 1) * torch.minimum(place_T, history_B[sequence_T])
    behaviour_T = offsets_B1[sequence_T] + len(users) + steps_T
    stream = _Writer(offsets_B1, behaviours_TD)
    own_ids_T = given.token_ids_T * stride
    if actions_TD is None:
        stream.write(
            behaviour_T, behaviours_TD, given.timestamps_T, layout.query_timestamps_T, own_ids_T
        )
    else:
        # A behaviour's next token is its own action, at the same time; an action's next token is
        # the next behaviour.
        stream.write(behaviour_T, behaviours_TD, given.timestamps_T, given.timestamps_T, own_ids_T)
        past_T = torch.nonzero(in_history_T).squeeze(1)
        times_H, looks_H = given.timestamps_T[past_T], layout.query_timestamps_T[past_T]
        stream.write(
            behaviour_T[past_T] + 1,
            actions_TD.index_select(0, past_T),
            times_H,
            looks_H,
            own_ids_T[past_T] + 1,
        )
    _write_users(stream, users, given)
    return Stream(stream.x_SD, stream.layout(layout), behaviour_T)


def _lay_out_one(
    given: ModelInput,
    behaviours_TD: torch.Tensor,
    time_bias: TimeBias,
    actions_TD: torch.Tensor | None,
) -> Stream:
    """`lay_out` of one sequence without user tokens, by slices: a served request is one."""
    times_T, stride = given.timestamps_T, 1 if actions_TD is None else 2
    total = times_T.numel()
    last = 0 if given.num_candidates_B is None else int(given.num_candidates_B[0])
    past, ids_T = total - last, given.token_ids_T * stride
    looks_T = times_T
    if time_bias == "next":
        looks_T = torch.cat([given.next_timestamps_T[:past], times_T[past:]])
    layout = Layout(
        given.offsets_B1, times_T, looks_T, ids_T, given.dropout_seed, given.num_candidates_B
    )
    if actions_TD is None:
        return Stream(behaviours_TD, layout, None)
    # A behaviour's next token is its own action, at the same time.
    place_T = torch.arange(total)
    layout = replace(
        layout,
        offsets_B1=given.offsets_B1 + torch.tensor([0, past]),
        timestamps_T=_interleaved(times_T, times_T, past),
        query_timestamps_T=_interleaved(times_T, looks_T, past),
        token_ids_T=_interleaved(ids_T, ids_T + 1, past),
    )
    x_SD = _interleaved(behaviours_TD, actions_TD, past)
    return Stream(x_SD, layout, place_T + place_T.clamp(max=past))


def _interleaved(first_T: torch.Tensor, second_T: torch.Tensor, pairs: int) -> torch.Tensor:
    """The first `pairs` rows of both in turns, then the other rows of the first."""
    both = torch.stack([first_T[:pairs], second_T[:pairs]], dim=1).flatten(0, 1)
    return torch.cat([both, first_T[pairs:]])


class _Writer:
    """Collects the columns of a stream, each token written to its place once."""

    def __init__(self, offsets_B1: torch.Tensor, like_TD: torch.Tensor) -> None:
        size = int(offsets_B1[-1])
        self.offsets_B1 = offsets_B1
        self.x_SD = like_TD.new_zeros(size, like_TD.shape[1])
        self.timestamps_S, self.looks_from_S, self.ids_S = (
            offsets_B1.new_zeros(size) for _ in range(3)
        )

    def write(
        self,
        at: torch.Tensor,
        x: torch.Tensor,
        times: torch.Tensor,
        looks_from: torch.Tensor,
        ids: torch.Tensor,
    ) -> None:
        """Write tokens `x` with their times and ids at places `at`."""
        self.x_SD = self.x_SD.index_copy(0, at, x)
        self.timestamps_S[at], self.looks_from_S[at], self.ids_S[at] = times, looks_from, ids

    def layout(self, like: Layout) -> Layout:
        """The layout of the whole stream, from `like`, the layout of the behaviours."""
        return replace(
            like,
            offsets_B1=self.offsets_B1,
            timestamps_T=self.timestamps_S,
            query_timestamps_T=self.looks_from_S,
            token_ids_T=self.ids_S,
        )


def _write_users(stream: _Writer, users: Sequence[torch.Tensor], given: ModelInput) -> None:
    """Write the user tokens; their ids derive from the sequence's first behaviour."""
    starts_B, nothing_B = given.offsets_B1[:-1], torch.zeros_like(given.offsets_B1[:-1])
    first_ids_B = nothing_B.clone()
    filled_B = given.offsets_B1.diff() > 0
    first_ids_B[filled_B] = given.token_ids_T[starts_B[filled_B]]
    for place, rows_BD in enumerate(users):
        names_B = mix64(mix64(first_ids_B) + place + 1)
        stream.write(stream.offsets_B1[:-1] + place, rows_BD, nothing_B, nothing_B, names_B)
