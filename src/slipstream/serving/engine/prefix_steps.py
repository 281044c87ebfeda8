"""A stream of tokens through the layers, behind what is cached, in one call or a layer a step.

Between two steps the caller may do something more urgent, which is how a ranking request overtakes
a long pre-inference. What is cached is read where it is stored and never changed. The keys and
values of the stream itself go to a buffer (a prefill), to a `Suffix` (candidates in tiles read
them again), or nowhere; those of its first tokens can be copied to a buffer as well. Where the
layers cannot be compiled they run one by one by their own `forward`. Touch this when a pass reads
or keeps something else.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from slipstream.models.backbone import KV, Layer, View, make_view, pass_tokens
from slipstream.models.head import SequenceModel
from slipstream.models.jagged import offsets_from_lengths, trailing_tokens
from slipstream.models.stream import Stream
from slipstream.ops.layer_pass import CompiledLayers, LayerRows
from slipstream.serving.engine.prefix import CachedTokens, PrefixBuffer

MOST_SCRATCH_TOKENS = 16_384  # of memory that is kept between passes


class Suffix:
    """The tokens behind the cached ones of one sequence that later passes read again."""

    def __init__(self, model: SequenceModel, capacity: int) -> None:
        self.tokens, self.capacity = 0, capacity
        self.times_S = torch.empty(capacity, dtype=torch.int64)
        self.rows = [model.backbone.new_rows(capacity) for _ in model.backbone.layers]

    def layer(self, index: int) -> KV:
        """Return a layer's tokens as the model's own type."""
        rows, kept = self.rows[index], self.tokens
        offsets_B1 = torch.tensor([0, kept])
        return KV(rows.k_SHK[:kept], rows.v_SHV[:kept], self.times_S[:kept], offsets_B1)


class RowScratch:
    """Memory of keys and values that one pass after another uses; one thread's."""

    def __init__(self, model: SequenceModel) -> None:
        self._model = model
        self._layers: dict[int, LayerRows] = {}

    def rows(self, layer: int, tokens: int) -> LayerRows:
        """Return a layer's memory for so many tokens; fresh memory costs a fault for every page."""
        found = self._layers.get(layer)
        if found is None or found.k_SHK.shape[0] < tokens:
            found = self._model.backbone.new_rows(tokens)
            if tokens <= MOST_SCRATCH_TOKENS:
                self._layers[layer] = found
        return found


class StreamPass:
    """A stream on its way through the layers, behind the cached tokens of each of its sequences."""

    def __init__(
        self,
        model: SequenceModel,
        stream: Stream,
        pasts: Sequence[CachedTokens] = (),
        *,
        wanted: Sequence[int] | None = None,
        suffix: Suffix | None = None,
        target: PrefixBuffer | None = None,
        kept: Sequence[CachedTokens | None] = (),
        scratch: "RowScratch | None" = None,
    ) -> None:
        """`pasts` has one entry for every sequence, or none.

        `wanted` is how many last tokens of each sequence the head reads, all unless given: the last
        layer computes no others. With `target` the stream's keys and values are stored there,
        behind the past, and no token is wanted. With `suffix` they are kept behind what it holds,
        where this pass and later ones read them. Both are for one sequence. `kept` has a buffer, or
        None, for every sequence without a past: it receives the first tokens, which are computed in
        `scratch`.
        """
        self.model, self.stream, self._pasts = model, stream, pasts
        self._suffix, self._target = suffix, target
        self._scratch = scratch or RowScratch(model)
        self._kept_first = [
            (begin, each)
            for begin, each in zip(stream.layout.offsets_B1.tolist(), kept, strict=False)
            if each is not None
        ]
        self._wanted = [0] if target is not None else wanted
        self._kept = 0 if suffix is None else suffix.tokens
        self._new = stream.layout.timestamps_T.numel()
        before = [past.tokens + self._kept for past in pasts] or [self._kept] * bool(self._kept)
        if suffix is not None:
            self._write_times(suffix, self._kept)
        if target is not None:
            self._write_times(target, self._first)
        for begin, (buffer, tokens) in self._kept_first:
            buffer.times_S[:tokens] = stream.layout.timestamps_T[begin : begin + tokens]
        self.x_TD = model.backbone.enter(
            stream.x_SD, stream.layout, torch.tensor(before) if before else None
        )
        self._compiled = model.backbone.compiled(self.x_TD)
        self._view: View | None = None

    @property
    def _first(self) -> int:
        """The place of the stream's first token in the target."""
        return self._pasts[0].tokens if self._pasts else 0

    def _write_times(self, memory: Suffix | PrefixBuffer, at: int) -> None:
        if at + self._new > memory.capacity:
            raise ValueError(f"{at} + {self._new} tokens do not fit a buffer of {memory.capacity}")
        memory.times_S[at : at + self._new] = self.stream.layout.timestamps_T

    def run(self, layers: range) -> torch.Tensor:
        """Run some layers, the next in order, and return the tokens after them.

        After the last layer they are the wanted ones, as the head reads them.
        """
        last = layers.stop == len(self.model.backbone.layers)
        if self._compiled is not None:
            self.x_TD = self._run_compiled(self._compiled, layers, last)
        else:
            for index in layers:
                self.x_TD = self._run_plain(index, last and index == layers.stop - 1)
        return self.model.backbone.leave(self.x_TD) if last else self.x_TD

    def _run_compiled(self, compiled: CompiledLayers, layers: range, last: bool) -> torch.Tensor:
        layout = self.stream.layout
        pasts = [past.buffer.stored(past.tokens) for past in self._pasts]
        tokens = pass_tokens(layout, pasts or None)
        if self._suffix is not None:
            end = self._kept + self._new
            tokens = replace(
                tokens,
                k_timestamps_S=self._suffix.times_S[:end],
                k_offsets_B1=torch.tensor([0, end]),
            )
        rows = self._rows(layers)
        x_TD = compiled.run(
            self.x_TD,
            tokens,
            layers=layers,
            rows=rows,
            precision=self.model.backbone.kv_precision,
            wanted=self._wanted if last else None,
        )
        for index, each in zip(layers, rows or (), strict=False):
            self._keep_first(index, each.k_SHK, each.v_SHV)
        return x_TD

    def _keep_first(self, index: int, k_SHK: torch.Tensor, v_SHV: torch.Tensor) -> None:
        """Copy a layer's keys and values of the first tokens to where they are kept."""
        for begin, (buffer, tokens) in self._kept_first:
            span = slice(begin, begin + tokens)
            buffer.write(index, 0, k_SHK[span], v_SHV[span])

    def _rows(self, layers: range) -> list[LayerRows] | None:
        """Return the memory of the layers' keys and values; None: scratch."""
        if self._suffix is not None:
            return [self._suffix.rows[index] for index in layers]
        if self._kept_first:
            return [self._scratch.rows(index, self._new) for index in layers]
        if self._target is None:
            return None
        buffer, at = self._target, self._first
        if buffer.shape.precision == "fp32":
            span = slice(at, at + self._new)
            return [
                LayerRows(buffer.layers[index][0][span], buffer.layers[index][1][span])
                for index in layers
            ]
        rows = self.model.backbone.new_rows(self._new)
        return [replace(rows, kept=buffer.addresses(index, at)) for index in layers]

    def _run_plain(self, index: int, last: bool) -> torch.Tensor:
        """Run one layer by its own `forward`, behind a copy of what is cached."""
        backbone, layout = self.model.backbone, self.stream.layout
        past = self._plain_past(index)
        if self._view is None:
            view = make_view(layout, None if past is None else [past])
            self._view = replace(view, kv_precision=backbone.kv_precision)
        layer = backbone.layers[index]
        assert isinstance(layer, Layer)
        x_TD = self.x_TD
        if last and self._target is not None:
            k_SHK, v_SHV = layer.keys_values(x_TD, self._view, past)
        else:
            x_TD, (k_SHK, v_SHV) = layer(x_TD, self._view, past)
        if last and self._wanted is not None:
            keep_B = torch.tensor(self._wanted)
            x_TD = x_TD[trailing_tokens(layout.offsets_B1, keep_B)]
        k_THK, v_THV = k_SHK[k_SHK.shape[0] - self._new :], v_SHV[v_SHV.shape[0] - self._new :]
        self._keep_first(index, k_THK, v_THV)
        if self._target is not None:
            self._target.write(index, self._first, k_THK, v_THV)
        if self._suffix is not None:
            rows, span = self._suffix.rows[index], slice(self._kept, self._kept + self._new)
            rows.k_SHK[span], rows.v_SHV[span] = k_THK, v_THV
        return x_TD

    def _plain_past(self, index: int) -> KV | None:
        """Return what comes before the stream in one layer, sequence by sequence."""
        parts = [past.buffer.layer(index, past.tokens) for past in self._pasts]
        if self._kept and self._suffix is not None:
            parts = [_joined([*parts, self._suffix.layer(index)], one=True)]
        return _joined(parts, one=False) if parts else None


def _joined(parts: Sequence[KV], *, one: bool) -> KV:
    """Return keys and values end to end: of one sequence, or of a sequence each."""
    lengths = [part.timestamps_S.numel() for part in parts]
    lengths_B = torch.tensor([sum(lengths)] if one else lengths)
    return KV(
        torch.cat([part.k_SHK for part in parts]),
        torch.cat([part.v_SHV for part in parts]),
        torch.cat([part.timestamps_S for part in parts]),
        offsets_from_lengths(lengths_B),
    )


def layer_steps(stream_pass: StreamPass) -> Iterator[torch.Tensor]:
    """Run all layers, one a step; yield the tokens after each, computed when asked for."""
    for index in range(len(stream_pass.model.backbone.layers)):
        yield stream_pass.run(range(index, index + 1))


def run_layers(stream_pass: StreamPass) -> torch.Tensor:
    """Run all layers at once and return the wanted tokens as the head reads them."""
    return stream_pass.run(range(len(stream_pass.model.backbone.layers)))
