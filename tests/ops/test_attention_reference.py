"""The reference attention: gradients by gradcheck, values by a loop over pairs written out here."""

import math
from dataclasses import replace

import pytest
import torch

from tests.support.attention_cases import OPERATORS, Case, run

SMALL = Case(
    lengths=(4, 0, 1, 3),
    heads=2,
    key_width=3,
    value_width=2,
    positions=3,
    buckets=20,
    candidates=True,
    window=3,
)


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("operator", ["hstu", "fuxi"])
@pytest.mark.parametrize("tail", [None, 2])
def test_gradients_are_those_of_finite_differences(operator, tail, functional):
    case = replace(SMALL, tail=tail, functional=functional)
    a = case.arguments()
    leaves = [a[name].double().requires_grad_() for name in ("q", "k", "v", "position", "time")]

    def call(q, k, v, position, time):
        return OPERATORS[operator](
            q,
            k,
            v,
            a["q_offsets"],
            a["k_offsets"],
            divisor=3.0,
            scale=0.7,
            bias=case.bias(position, time),
            timestamps_T=a["timestamps"],
            k_timestamps_S=a["k_timestamps"],
            num_candidates_B=a["candidates"].clamp(max=tail or 9),
            window=3,
            backend="reference",
        )

    assert torch.autograd.gradcheck(call, leaves)


def by_time(case: Case, time: torch.Tensor, dt: int) -> float:
    """The time bias of one gap in seconds: the formulas of buckets and of the function."""
    if case.functional:
        a, b, c = time.tolist()
        return a * math.exp(-b * (dt / 86_400) ** c)
    return float(time[min(math.floor(math.log(max(dt, 1)) / 0.301), case.buckets)])


def pairwise(case: Case) -> torch.Tensor:
    """HSTU's attention pair by pair in plain Python floats."""
    a = case.arguments()
    out = torch.zeros(a["q"].shape[0], case.heads, case.value_width, dtype=torch.float64)
    q, k, v, n = a["q"].double(), a["k"].double(), a["v"].double(), case.positions
    for b in range(len(case.lengths)):
        (q0, q1), (k0, k1) = a["q_offsets"][b : b + 2].tolist(), a["k_offsets"][b : b + 2].tolist()
        history = k1 - k0 - int(a["candidates"][b])
        for i in range(q1 - q0):
            own = k1 - k0 - (q1 - q0) + i
            for j in range(own + 1):
                if j != own and j >= history:
                    continue
                apart = min(own, history) - min(j, history)
                if case.window is not None and apart >= case.window:
                    continue
                dt = abs(int(a["timestamps"][q0 + i]) - int(a["k_timestamps"][k0 + j]))
                bias = float(a["position"][min(apart, n - 1) + n - 1]) + by_time(
                    case, a["time"], dt
                )
                for h in range(case.heads):
                    score = 0.4 * float(q[q0 + i, h] @ k[k0 + j, h]) + bias
                    out[q0 + i, h] += score / (1 + math.exp(-score)) / 25.0 * v[k0 + j, h]
    return out


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"tail": 5},
        {"window": 4},
        {"window": 3, "tail": 9, "sorted_times": False},
        {"functional": True},
        {"functional": True, "window": 3, "tail": 9, "sorted_times": False},
    ],
)
def test_reference_equals_the_sum_over_pairs(extra):
    case = Case(lengths=(12, 0, 1, 9), positions=6, candidates=True, **extra)
    torch.testing.assert_close(
        run(case, "reference", torch.float64)[0], pairwise(case), rtol=1e-9, atol=1e-11
    )
