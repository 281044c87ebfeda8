"""Both ways of reading negatives give one loss, and a process of its own reports its memory."""

import pytest

from slipstream.bench import negative_memory
from slipstream.bench.step_samples import JaggedStep, batch_of
from tests.support.step_recipes import small_recipe

ITEMS = 40
LENGTHS = [1, 7, 12, 3]


def test_gathering_negatives_gives_the_same_loss():
    recipe, batch = small_recipe(), batch_of(LENGTHS, ITEMS, seed=4)
    ours = JaggedStep.of(recipe, ITEMS)(batch)
    gathered = JaggedStep.of(negative_memory.use_gathered_softmax(recipe), ITEMS)(batch)
    assert gathered == pytest.approx(ours, rel=1e-5)


@pytest.mark.system
def test_a_step_in_a_process_of_its_own_reports_its_memory():
    found = negative_memory.measure([20, 5], 50, threads=1, repeats=1)
    assert found["fused"][0]["losses"] == pytest.approx(found["gathered"][0]["losses"], rel=1e-4)
    assert found["fused"][0]["peak_bytes"] > 0
