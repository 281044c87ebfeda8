"""What the kernel benchmark compares computes the same thing."""

import pytest

from slipstream.bench import kernels


def test_a_peer_that_computes_something_else_is_refused(monkeypatch):
    problem = kernels.AttentionProblem(3, 2, 8)
    kernels.check_agreement(problem)
    monkeypatch.setattr(kernels, "loop", lambda p: lambda: tuple(2 * x for x in p.ours(True)()))
    with pytest.raises(AssertionError, match="something else"):
        kernels.check_agreement(problem)
