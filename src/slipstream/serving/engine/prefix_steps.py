"""One sequence through the layers in steps, with keys and values written where they stay.

A step is one chunk of tokens through one layer. Between two steps the caller may do something more
urgent, which is how a ranking request overtakes a long pre-inference. Keys and values go straight
into a `PrefixBuffer` behind those already there: nothing is copied, and what lies before is read in
place. Touch this when a layer gets another step, or the buffer another layout.
"""

from collections.abc import Iterator

import torch

from slipstream.models.backbone import KV, Layer, View
from slipstream.models.head import SequenceModel
from slipstream.models.stream import Stream
from slipstream.serving.engine.prefix import PrefixBuffer


class InPlaceView(View):
    """A view whose past has room behind it: new rows are written there, not copied together."""

    def join(self, past: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Write `new` behind `past` and return both as one longer view of the same memory."""
        before, rows = past.shape[0], past.shape[0] + new.shape[0]
        joined = past.as_strided((rows, *past.shape[1:]), past.stride(), past.storage_offset())
        joined[before:] = new
        return joined


def in_place_view(stream: Stream, buffer: PrefixBuffer, tokens: int) -> InPlaceView:
    """Return the view of one sequence behind a buffer's first `tokens`, and write its times."""
    layout = stream.layout
    new = layout.timestamps_T.numel()
    if tokens + new > buffer.capacity:
        raise ValueError(f"{tokens} + {new} tokens do not fit a buffer of {buffer.capacity}")
    buffer.times_S[tokens : tokens + new] = layout.timestamps_T
    return InPlaceView(
        q_offsets_B1=layout.offsets_B1,
        k_offsets_B1=torch.tensor([0, tokens + new]),
        query_timestamps_T=layout.query_timestamps_T,
        key_timestamps_S=buffer.times_S[: tokens + new],
        token_ids_T=layout.token_ids_T,
        num_candidates_B=layout.num_candidates_B,
        dropout_seed=None,
        join_S=None,
    )


def layer_steps(
    model: SequenceModel, stream: Stream, buffer: PrefixBuffer, tokens: int, *, fill: bool = False
) -> Iterator[torch.Tensor]:
    """Run one sequence's stream behind the buffer's first `tokens`; yield it after every layer.

    The last yield is what the head reads. With `fill` only the buffer is needed: the last layer
    leaves keys and values and attends to nothing, which saves half the attention of two layers.
    Each step is computed when the caller asks for it.
    """
    view = in_place_view(stream, buffer, tokens)
    x_TD = model.backbone.enter(stream.x_SD, view)
    last = len(model.backbone.layers) - 1
    for index, layer in enumerate(model.backbone.layers):
        past: KV = buffer.layer(index, tokens)
        assert isinstance(layer, Layer)
        if fill and index == last:
            layer.keys_values(x_TD, view, past)
            yield x_TD
            return
        x_TD, _ = layer(x_TD, view, past)
        yield model.backbone.leave(x_TD) if index == last else x_TD


def run_layers(
    model: SequenceModel, stream: Stream, buffer: PrefixBuffer, tokens: int
) -> torch.Tensor:
    """Run all layers and return the hidden rows of the stream's behaviours."""
    *_, hidden_SD = layer_steps(model, stream, buffer, tokens)
    return stream.behaviours(hidden_SD)
