"""The stateless generator: fixed forever, equal in both languages, and random enough."""

import torch

from slipstream.ops import counter_random
from slipstream.ops.kernel_call import kernel
from tests.support.operator_parity import needs_native


def test_known_values_never_change():
    """Stored runs depend on these bits; the first is SplitMix64's from state 0."""
    assert counter_random.mix64_int(0) % (1 << 64) == 0xE220A8397B1DCDAF
    assert counter_random.derive_seed(1, 2) != counter_random.derive_seed(2, 1)


def test_one_number_is_mixed_like_a_tensor_of_them():
    values = [0, 1, -1, 5, 2**31, 2**63 - 1, -(2**63), 0x5BD1E9955BD1E995]
    mixed = counter_random.mix64(torch.tensor(values)).tolist()
    assert [counter_random.mix64_int(value) for value in values] == mixed
    assert counter_random.mix64_int(2**64 + 5) == counter_random.mix64_int(5)


@needs_native
def test_the_compiled_function_is_equal_bit_for_bit():
    rows_T = torch.tensor([0, 1, 2**63 - 1, -5, 12345678901234])
    out = torch.empty(5, 7)
    kernel("ss_random_uniform")(99, rows_T, 5, 7, out)
    assert torch.equal(out, counter_random.random_uniform(99, rows_T, 7))


def test_uniform_and_integers_look_uniform():
    rows_T = torch.arange(20_000)
    uniform = counter_random.random_uniform(7, rows_T, 10)
    assert uniform.min() >= 0 and uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 2e-3
    counts = torch.bincount(
        counter_random.random_integers(7, rows_T, 10, 50).flatten(), minlength=50
    )
    assert counts.numel() == 50 and counts.min() > 3_600 and counts.max() < 4_400
