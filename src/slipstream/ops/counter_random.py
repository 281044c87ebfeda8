"""Random numbers without state: a pure function of (seed, row, column).

Dropout masks, negatives and the initial values of embedding rows come from it. A number does not
depend on when, where or in which order it is drawn, so micro-batches, ranks, tables and resumed
runs see the same numbers. `native/counter_random.h` is the same function, bit for bit. Do not
change what it computes: stored runs depend on it.
"""

import torch

_M1, _M2, _GOLDEN = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15
_SIGN = 1 << 64


def _signed(value: int) -> int:
    value %= _SIGN
    return value - _SIGN if value >= 1 << 63 else value


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 right, with zeros coming in from the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix64(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser of an int64 tensor, read as unsigned 64-bit numbers."""
    x = x + _signed(_GOLDEN)
    x = (x ^ _shift(x, 30)) * _signed(_M1)
    x = (x ^ _shift(x, 27)) * _signed(_M2)
    return x ^ _shift(x, 31)


def mix64_int(x: int) -> int:
    """`mix64` of one Python integer, as a signed 64-bit value: for deriving seeds."""
    x = (x + _GOLDEN) % _SIGN
    x = (x ^ (x >> 30)) * _M1 % _SIGN
    x = (x ^ (x >> 27)) * _M2 % _SIGN
    return _signed(x ^ (x >> 31))


def derive_seed(*parts: int) -> int:
    """One 63-bit seed from several integers (run seed, step, layer, purpose …); order matters."""
    state = 0
    for part in parts:
        state = mix64_int(state ^ mix64_int(part))
    return state & ((1 << 63) - 1)


def random_bits(seed: int, rows_T: torch.Tensor, columns: int) -> torch.Tensor:
    """int64 [T, columns]: 64 random bits for every (seed, row, column)."""
    rows_T1 = mix64(rows_T.to(torch.int64) ^ mix64_int(seed)).unsqueeze(1)
    columns_C = torch.arange(columns, dtype=torch.int64, device=rows_T.device)
    return mix64(rows_T1 + columns_C)


def random_uniform(
    seed: int, rows_T: torch.Tensor, columns: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Uniform in [0, 1) with 24 random bits: exact in fp32, so all back-ends agree bit for bit."""
    return _shift(random_bits(seed, rows_T, columns), 40).to(dtype) * (1.0 / (1 << 24))


def random_integers(seed: int, rows_T: torch.Tensor, columns: int, below: int) -> torch.Tensor:
    """int64 in [0, below), below <= 2^31: the top 32 bits scaled (bias under 2^-32 * below)."""
    if not 0 < below <= 1 << 31:
        raise ValueError(f"below must be between 1 and 2^31, got {below}")
    return (_shift(random_bits(seed, rows_T, columns), 32) * below) >> 32
