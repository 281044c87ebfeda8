"""What every attention back-end receives: checked arguments, and how the time bias is defined.

Touch this when the attention operators get another argument.
"""

import decimal
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Required, TypedDict

import torch

from slipstream.ops import operand_checks

LAST_BORDER = (1 << 63) - 1
MAX_BUCKETS = 512
TIME_UNIT = 86_400.0  # of the functional time bias: timestamps count seconds, it counts days


@dataclass(frozen=True)
class RelativeBias:
    """Learned position and time biases shared by all heads of a layer; either may be absent.

    position_P has 2n - 1 entries, entry clamp(i - j, 1 - n, n - 1) + n - 1 for query position i and
    key position j. The time bias of |dt| = |query time - key time| is one of two: time_W has
    buckets + 1 entries, chosen by `time_bucket_borders`; decay_3 holds a, b and c > 0 of the
    function a · exp(-b · (|dt| / TIME_UNIT)^c), which is a at |dt| = 0.
    """

    position_P: torch.Tensor | None = None
    time_W: torch.Tensor | None = None
    decay_3: torch.Tensor | None = None

    @property
    def timed(self) -> bool:
        """Whether there is a time bias of either kind."""
        return self.time_W is not None or self.decay_3 is not None


class AttentionOptions(TypedDict, total=False):
    """The options of `hstu_attention` and `fuxi_attention`."""

    divisor: Required[float]  # of SiLU's result: a constant of the model
    scale: float  # of q·k; 1 unless given
    bias: RelativeBias | None
    timestamps_T: torch.Tensor | None  # from when each query looks back; needed with a time bias
    k_timestamps_S: torch.Tensor | None  # when each key happened; timestamps_T unless given
    num_candidates_B: torch.Tensor | None  # how many last tokens of each sequence are candidates
    window: int | None  # keep only the keys fewer than so many positions back


@functools.lru_cache(maxsize=64)
def _borders(num_buckets: int) -> tuple[int, ...]:
    with decimal.localcontext() as context:
        context.prec = 60
        width = decimal.Decimal("0.301")
        powers = (
            (width * b).exp().to_integral_value(rounding=decimal.ROUND_CEILING)
            for b in range(1, num_buckets + 1)
        )
        return (0, *(min(int(power), LAST_BORDER) for power in powers))


@functools.lru_cache(maxsize=64)
def time_bucket_borders(num_buckets: int) -> torch.Tensor:
    """int64 [num_buckets + 1]: entry b is the smallest |dt| that falls in bucket b or above.

    bucket = min(floor(ln(max(|dt|, 1)) / 0.301), num_buckets), that is: the last entry that does
    not exceed |dt|. The powers of e^0.301 are irrational, so rounding them up in 60 digits is
    exact. Borders beyond int64 become 2^63 - 1, which no difference of two timestamps reaches.
    Every back-end compares with these integers instead of computing a logarithm. The tensor is
    made once and shared: do not change it.
    """
    if not 0 <= num_buckets <= MAX_BUCKETS:
        raise ValueError(
            f"the time table must have between 1 and {MAX_BUCKETS + 1} entries, got "
            f"{num_buckets + 1}"
        )
    return torch.tensor(_borders(num_buckets), dtype=torch.int64)


@dataclass(frozen=True)
class AttentionArguments:
    """One checked call: tensors on one device, floats of one dtype, offsets and times int64."""

    q_THK: torch.Tensor
    k_SHK: torch.Tensor
    v_SHV: torch.Tensor
    q_offsets_B1: torch.Tensor
    k_offsets_B1: torch.Tensor
    divisor: float
    scale: float
    position_P: torch.Tensor | None
    time_W: torch.Tensor | None
    borders_W: torch.Tensor | None
    decay_3: torch.Tensor | None
    timestamps_T: torch.Tensor | None
    k_timestamps_S: torch.Tensor | None
    num_candidates_B: torch.Tensor | None
    window: int | None

    @property
    def leaves(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors that gradients reach."""
        return (self.q_THK, self.k_SHK, self.v_SHV, self.position_P, self.time_W, self.decay_3)

    def output_shape(self, channels: int) -> tuple[int, ...]:
        """[T, H, V], with a channel axis after the tokens where there are several channels."""
        tokens, (heads, width) = self.q_THK.shape[0], self.v_SHV.shape[1:]
        return (tokens, heads, width) if channels == 1 else (tokens, channels, heads, width)

    def spans(self) -> Iterator[tuple[int, int, int, int]]:
        """(first query, past last query, first key, past last key) of every sequence."""
        q, k = self.q_offsets_B1.tolist(), self.k_offsets_B1.tolist()
        yield from zip(q[:-1], q[1:], k[:-1], k[1:], strict=True)


def _check_lengths(
    q_offsets_B1: torch.Tensor, k_offsets_B1: torch.Tensor, num_candidates_B: torch.Tensor | None
) -> None:
    if q_offsets_B1.device.type != "cpu":
        return
    if len(k_offsets_B1) <= operand_checks.FEW:  # a served request: numbers are faster than tensors
        q, k = q_offsets_B1.tolist(), k_offsets_B1.tolist()
        candidates = [0] * len(q) if num_candidates_B is None else num_candidates_B.tolist()
        spans = [(q[i + 1] - q[i], k[i + 1] - k[i], candidates[i]) for i in range(len(q) - 1)]
        if all(queries <= keys and 0 <= last <= keys for queries, keys, last in spans):
            return
    k_lengths = k_offsets_B1.diff()
    if q_offsets_B1 is not k_offsets_B1 and bool((q_offsets_B1.diff() > k_lengths).any()):
        raise ValueError(
            "every sequence needs at least as many keys as queries: the queries are the tail of "
            "the keys"
        )
    if num_candidates_B is not None and bool(
        ((num_candidates_B < 0) | (num_candidates_B > k_lengths)).any()
    ):
        raise ValueError(
            "num_candidates_B must lie between 0 and the number of keys of each sequence"
        )


def check_arguments(
    q_THK: torch.Tensor,
    k_SHK: torch.Tensor,
    v_SHV: torch.Tensor,
    q_offsets_B1: torch.Tensor,
    k_offsets_B1: torch.Tensor | None,
    *,
    divisor: float,
    scale: float = 1.0,
    bias: RelativeBias | None = None,
    timestamps_T: torch.Tensor | None = None,
    k_timestamps_S: torch.Tensor | None = None,
    num_candidates_B: torch.Tensor | None = None,
    window: int | None = None,
) -> AttentionArguments:
    """Check every argument of a call and fill in those left out."""
    bias = bias if bias is not None else RelativeBias()
    _check_operands(q_THK, k_SHK, v_SHV, bias)
    k_offsets_B1 = _check_offsets(q_THK, k_SHK, q_offsets_B1, k_offsets_B1)
    if num_candidates_B is not None:
        operand_checks.tensor("num_candidates_B", num_candidates_B, dims=1, dtype=torch.int64)
        if num_candidates_B.numel() != q_offsets_B1.numel() - 1:
            raise ValueError(
                f"num_candidates_B must have one entry per sequence ({q_offsets_B1.numel() - 1})"
            )
    timestamps_T, k_timestamps_S = _check_times(
        bias, q_THK.shape[0], k_SHK.shape[0], timestamps_T, k_timestamps_S
    )
    for name, tensor in {
        "q_offsets_B1": q_offsets_B1,
        "k_offsets_B1": k_offsets_B1,
        "num_candidates_B": num_candidates_B,
        "timestamps_T": timestamps_T,
        "k_timestamps_S": k_timestamps_S,
    }.items():
        if tensor is not None:
            operand_checks.same_device(name, tensor, "q_THK", q_THK)
    _check_lengths(q_offsets_B1, k_offsets_B1, num_candidates_B)
    if window is not None and (
        isinstance(window, bool) or not isinstance(window, int) or window < 1
    ):
        raise ValueError(f"window must be a whole number of at least 1, got {window!r}")
    borders_W = None
    if bias.time_W is not None:
        borders_W = time_bucket_borders(bias.time_W.numel() - 1).to(q_THK.device)
    return AttentionArguments(
        q_THK=q_THK,
        k_SHK=k_SHK,
        v_SHV=v_SHV,
        q_offsets_B1=q_offsets_B1,
        k_offsets_B1=k_offsets_B1,
        divisor=operand_checks.number("divisor", divisor, positive=True),
        scale=operand_checks.number("scale", scale),
        position_P=bias.position_P,
        time_W=bias.time_W,
        borders_W=borders_W,
        decay_3=bias.decay_3,
        timestamps_T=timestamps_T,
        k_timestamps_S=k_timestamps_S,
        num_candidates_B=num_candidates_B,
        window=window,
    )


def _check_operands(
    q_THK: torch.Tensor, k_SHK: torch.Tensor, v_SHV: torch.Tensor, bias: RelativeBias
) -> None:
    operands = {"q_THK": q_THK, "k_SHK": k_SHK, "v_SHV": v_SHV}
    for name, value in operands.items():
        operand_checks.tensor(name, value, dims=3)
    if k_SHK.shape[1:] != q_THK.shape[1:] or v_SHV.shape[:2] != k_SHK.shape[:2]:
        raise ValueError(
            "q_THK, k_SHK and v_SHV must agree on heads, on key width and on key tokens, "
            f"got {tuple(q_THK.shape)}, {tuple(k_SHK.shape)} and {tuple(v_SHV.shape)}"
        )
    if 0 in (*q_THK.shape[1:], v_SHV.shape[2]):
        raise ValueError(
            f"heads and head widths must be above 0, got {tuple(q_THK.shape)} and "
            f"{tuple(v_SHV.shape)}"
        )
    if not isinstance(bias, RelativeBias):
        raise TypeError(f"bias must be a RelativeBias, got {type(bias).__name__}")
    tables = {"position_P": bias.position_P, "time_W": bias.time_W, "decay_3": bias.decay_3}
    for name, table in tables.items():
        if table is not None:
            operand_checks.tensor(name, table, dims=1)
    operand_checks.alike(operands | tables)
    if bias.position_P is not None and bias.position_P.numel() % 2 == 0:
        raise ValueError(
            f"position_P must have 2n - 1 entries, an odd number, got {bias.position_P.numel()}"
        )
    if bias.decay_3 is not None and bias.decay_3.numel() != 3:
        raise ValueError(f"decay_3 must hold a, b and c, got {bias.decay_3.numel()} entries")
    if bias.time_W is not None and bias.decay_3 is not None:
        raise ValueError("time_W and decay_3 are two kinds of time bias: give one of them")


def _check_offsets(
    q_THK: torch.Tensor,
    k_SHK: torch.Tensor,
    q_offsets_B1: torch.Tensor,
    k_offsets_B1: torch.Tensor | None,
) -> torch.Tensor:
    """The keys' offsets: those given, or the queries' where both are the same tokens."""
    operand_checks.offsets("q_offsets_B1", q_offsets_B1, q_THK.shape[0])
    if k_offsets_B1 is None:
        if k_SHK.shape[0] != q_THK.shape[0]:
            raise ValueError("k_offsets_B1 is required when there are more keys than queries")
        return q_offsets_B1
    operand_checks.offsets("k_offsets_B1", k_offsets_B1, k_SHK.shape[0])
    if k_offsets_B1.shape != q_offsets_B1.shape:
        raise ValueError(
            f"q_offsets_B1 and k_offsets_B1 must have one length, got {len(q_offsets_B1)} and "
            f"{len(k_offsets_B1)}"
        )
    return k_offsets_B1


def _check_times(
    bias: RelativeBias,
    num_queries: int,
    num_keys: int,
    timestamps_T: torch.Tensor | None,
    k_timestamps_S: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The queries' and the keys' times, both None where there is no time bias."""
    if timestamps_T is not None:
        operand_checks.times("timestamps_T", timestamps_T, num_queries)
    if k_timestamps_S is not None:
        operand_checks.times("k_timestamps_S", k_timestamps_S, num_keys)
    if not bias.timed:
        return None, None
    if timestamps_T is None:
        raise ValueError("timestamps_T is required with a time bias")
    if k_timestamps_S is None:
        if num_keys != num_queries:
            raise ValueError("k_timestamps_S is required when there are more keys than queries")
        k_timestamps_S = timestamps_T
    return timestamps_T, k_timestamps_S
