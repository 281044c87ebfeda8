"""The compiled attention equals the reference: output and every gradient, on one thread or two."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.ops import attention_native, native
from slipstream.ops.attention import (
    RelativeBias,
    fuxi_attention,
    hstu_attention,
    time_bucket_borders,
)
from slipstream.ops.attention_types import TIME_UNIT
from tests.support.attention_cases import OPERATORS, Case, assert_close, distances, run
from tests.support.processes import run_python

pytestmark = pytest.mark.skipif(
    not native.available(), reason="native kernels were not built on this machine"
)

LENGTHS = st.lists(
    st.sampled_from(
        [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 65, 96, 97, 127, 128, 129, 150]
    ),
    max_size=5,
)
CASES = st.builds(
    Case,
    lengths=LENGTHS.map(tuple),
    tail=st.none() | st.sampled_from([1, 5, 40, 100]),
    heads=st.integers(1, 3),
    key_width=st.sampled_from([1, 3, 8, 16, 25, 32, 50]),
    value_width=st.sampled_from([1, 5, 8, 16, 25, 33]),
    position=st.booleans(),
    time=st.booleans(),
    functional=st.booleans(),
    positions=st.sampled_from([1, 2, 30, 200]),
    buckets=st.sampled_from([0, 1, 20, 128]),
    candidates=st.booleans(),
    window=st.none() | st.sampled_from([1, 2, 10, 70]),
    sorted_times=st.booleans(),
    contiguous=st.booleans(),
    operator=st.sampled_from(["hstu", "fuxi"]),
    seed=st.integers(0, 5),
)


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(case=CASES, threads=st.sampled_from([1, 2]))
def test_equals_the_reference(case, threads):
    torch.set_num_threads(threads)
    assert_close(case, "native")


@pytest.mark.system  # the reference needs seconds for a map of 4,096 x 4,096
@pytest.mark.parametrize("operator", ["hstu", "fuxi"])
def test_a_long_sequence_equals_the_reference(operator):
    assert_close(
        Case(
            lengths=(4096, 3),
            heads=1,
            key_width=8,
            value_width=8,
            positions=5000,
            buckets=128,
            operator=operator,
        ),
        "native",
    )


def test_the_comparison_can_fail(monkeypatch):
    honest = attention_native._run
    monkeypatch.setattr(
        attention_native,
        "_run",
        lambda name, a, *rest, **out: honest(name, replace(a, scale=a.scale * 1.001), *rest, **out),
    )
    assert max(distances(Case(), "native").values()) > 1e-4


@pytest.mark.parametrize("spoil", [0, 1, 2])
def test_a_wrong_parameter_of_the_function_would_be_seen(monkeypatch, spoil):
    honest = attention_native._run

    def spoilt(name, a, *rest, **out):
        wrong = a.decay_3.clone()
        wrong[spoil] *= 1.001
        honest(name, replace(a, decay_3=wrong), *rest, **out)

    monkeypatch.setattr(attention_native, "_run", spoilt)
    found = distances(Case(functional=True, operator="fuxi"), "native")
    assert found["out"] > 2e-5 and found["grad time"] > 2e-5


@pytest.mark.parametrize("exponent", [3, 31, 40, 61])  # within 32 bits, or beyond
def test_the_function_of_any_gap(exponent):
    """The output for a key so long ago is the function itself, from a gap of 0 on."""
    edges = [2**n + d for n in range(exponent) for d in (-1, 0, 1)]
    apart = torch.tensor([0, *edges, 2**exponent - 1]).clamp(min=0).unique()
    for sign, decay in ((1, [1.5, 1.0, 0.5]), (-1, [0.5, 1e-3, 0.25]), (1, [2.0, 3.0, 1.0])):
        one, decay_3 = torch.ones(len(apart), 1, 1), torch.tensor(decay)
        out = fuxi_attention(
            one,
            one,
            one,
            torch.tensor([0, len(apart)]),
            divisor=1.0,
            bias=RelativeBias(decay_3=decay_3),
            timestamps_T=apart * sign,
            k_timestamps_S=torch.zeros(len(apart), dtype=torch.int64),
            window=1,
            backend="native",
        )[:, 1].flatten()
        days = apart.double() / TIME_UNIT
        expected = decay[0] * torch.exp(-decay[1] * days ** decay[2])
        torch.testing.assert_close(out.double(), expected, rtol=3e-6, atol=2e-7)


@pytest.mark.parametrize("sorted_times", [True, False])
def test_time_buckets_at_every_border(sorted_times):
    """The output for queries at each border - 1, border and border + 1 is their bucket."""
    borders = time_bucket_borders(128)
    apart = torch.cat([borders - 1, borders, borders + 1]).clamp(0, 2**61).unique()
    order = (
        torch.arange(len(apart))
        if sorted_times
        else torch.randperm(len(apart), generator=torch.Generator().manual_seed(0))
    )
    apart = apart[order]
    expected = torch.bucketize(apart, borders, right=True) - 1
    for sign in (1, -1):
        one = torch.ones(len(apart), 1, 1)
        table = torch.arange(129.0) + 1
        # every query sees the whole row of keys at time 0; silu(16 b) = 16 b for whole b >= 1
        out = hstu_attention(
            one * 0,
            one * 0,
            one,
            torch.tensor([0, len(apart)]),
            divisor=16.0,
            bias=RelativeBias(time_W=table * 16),
            timestamps_T=apart * sign,
            k_timestamps_S=torch.zeros(len(apart), dtype=torch.int64),
            window=1,
            backend="native",
        )
        torch.testing.assert_close(out.flatten(), (expected + 1).float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("operator", ["hstu", "fuxi"])
def test_two_calls_give_the_same_bits(operator, functional):
    case = Case(
        lengths=(200, 17, 90, 3, 151),
        heads=2,
        key_width=16,
        value_width=16,
        operator=operator,
        functional=functional,
    )
    assert all(
        torch.equal(a, b) for a, b in zip(run(case, "native"), run(case, "native"), strict=True)
    )


@pytest.mark.parametrize("first_time", [None, 0, -(10**12)])  # user tokens; beyond 32 bits
@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("operator", ["hstu", "fuxi"])
def test_rows_do_not_depend_on_what_follows_or_on_the_number_of_queries(
    operator, functional, first_time
):
    """A prefix, and the last queries against all keys, give the rows of the full pass."""
    length = 301
    case = Case(lengths=(length,), heads=2, key_width=25, value_width=25, functional=functional)
    a = case.arguments()
    if first_time is not None:
        a["timestamps"][0] = a["k_timestamps"][0] = first_time
        a["k_timestamps"][-1] += 10**13  # beyond 32 bits only where the last key is there

    def rows(first: int, end: int) -> torch.Tensor:
        return OPERATORS[operator](
            a["q"][first:end],
            a["k"][:end],
            a["v"][:end],
            torch.tensor([0, end - first]),
            torch.tensor([0, end]),
            divisor=25.0,
            scale=0.4,
            bias=case.bias(a["position"], a["time"]),
            timestamps_T=a["timestamps"][first:end],
            k_timestamps_S=a["k_timestamps"][:end],
            backend="native",
        )

    full = rows(0, length)
    for first, end in [
        (0, 1),
        (0, 7),
        (0, 96),
        (0, 200),
        (0, 299),
        (300, 301),
        (298, 301),
        (293, 301),
        (201, 301),
        (151, 250),
    ]:
        assert torch.equal(rows(first, end), full[first:end]), (first, end)


@pytest.fixture
def _poisoned_memory():
    """New tensors hold NaN until they are written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.parametrize("operator", ["hstu", "fuxi"])
@pytest.mark.parametrize("widths", [(16, 32), (25, 13)])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"tail": 0},  # keys without a query
        {"tail": 100},  # a second block that begins inside a panel of keys
        {"tail": 41, "window": 9},  # keys before the first window
        {"tail": 100, "candidates": True},
        {"window": 1, "candidates": True},  # candidates that see only themselves
        {"tail": 3, "window": 1, "candidates": True},
        {"position": False},
        {"position": False, "time": False},
        {"functional": True, "candidates": True},
        {"functional": True, "tail": 41, "window": 9, "position": False},
    ],
)
def test_every_value_is_written(extra, widths, operator):
    assert torch.empty(1).isnan().all()
    case = Case(
        lengths=(5, 200, 0, 1, 97),
        key_width=widths[0],
        value_width=widths[1],
        operator=operator,
        **extra,
    )
    assert_close(case, "native")


@pytest.mark.system
def test_memory_is_linear_in_tokens():
    """20,000 tokens within 800 MB of new memory: one 20,000 x 20,000 map would need 1.6 GB."""
    code = (
        "import pathlib, resource, torch\n"
        "from slipstream.ops.attention import hstu_attention\n"
        "q = torch.randn(20000, 1, 4, requires_grad=True)\n"
        "used = int(pathlib.Path('/proc/self/statm').read_text().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (800 << 20), -1))\n"
        "hstu_attention(q, q, q, torch.tensor([0, 20000]), divisor=1.0, window=500, "
        "backend='native').sum().backward()\n"
        "print(q.grad.shape[0])\n"
    )
    assert run_python(code) == "20000"


@pytest.mark.system
@pytest.mark.parametrize("level", ["baseline", "avx2", "avx512"])
def test_every_instruction_set_equals_the_reference(level):
    folder = Path(os.environ.get("SLIPSTREAM_NATIVE_DIR") or Path(native.__file__).parent)
    if not list(folder.glob(f"_native_{level}.*so")):
        pytest.skip(f"level {level} was not built on this machine")
    best = {"AVX512": 2, "AVX2": 1}.get(torch.backends.cpu.get_cpu_capability(), 0)
    if ["baseline", "avx2", "avx512"].index(level) > best:
        pytest.skip(f"this CPU has no {level}")
    code = (
        "from tests.support.attention_cases import Case, assert_close\n"
        "from slipstream.ops import native\n"
        f"assert '{level}' in native.status(), native.status()\n"
        "for op in ('hstu', 'fuxi'):\n"
        # every place of a panel's last row against the keys' panels
        "    tails = [{'tail': n} for n in range(41, 47)]\n"
        "    for extra in ({}, {'window': 9, 'tail': 50}, {'candidates': True, 'sorted_times': "
        "False}, {'functional': True}, {'functional': True, 'candidates': True, 'tail': 50}, "
        "*tails):\n"
        "        for widths in ((25, 13), (16, 32)):\n"  # gradients in scratch, and in place
        "            sizes = {'key_width': widths[0], 'value_width': widths[1]}\n"
        "            assert_close(Case(lengths=(150, 0, 1, 65), operator=op, **sizes, **extra), "
        "'native')\n"
        "print('equal')\n"
    )
    assert run_python(code, SLIPSTREAM_NATIVE_LEVEL=level) == "equal"
