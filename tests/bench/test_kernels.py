"""What the kernel benchmark compares computes the same thing."""

import pytest

from slipstream.bench import kernels


def test_a_peer_that_computes_something_else_is_refused(monkeypatch):
    problem = kernels.AttentionProblem(3, 2, 8)
    kernels.check_agreement(problem)
    monkeypatch.setattr(kernels, "loop", lambda p: lambda: tuple(2 * x for x in p.ours(True)()))
    with pytest.raises(AssertionError, match="something else"):
        kernels.check_agreement(problem)


def test_mfu_is_against_the_best_matmul_sample_of_all_shapes():
    rows = [
        {"variant": "a", "gflops": 30.0, "peak_samples": [40.0, 50.0]},
        {"variant": "b", "gflops": 20.0, "peak_samples": [60.0, 45.0]},
    ]
    kernels.add_mfu(rows)
    assert [row["mfu"] for row in rows] == pytest.approx([0.5, 1 / 3])
    assert {row["peak_gflops"] for row in rows} == {60.0}
