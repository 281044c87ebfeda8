"""The cache of a disk table: slots are reused, the longest unused rows are evicted first."""

import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.tables.disk_cache import RowCache
from slipstream.tables.embedding_table import Rows
from slipstream.tables.row_optimizers import RowwiseAdagrad


def cache(rows=20):
    return RowCache("item", rows * (16 + 81), 16, RowwiseAdagrad(), 2, torch.float32)


def fill(one, numbers):
    one.clock += 1
    numbers = torch.tensor(numbers)
    return one.allocate(numbers)


def test_rows_are_found_by_number_and_keep_their_contents():
    one = cache()
    slots = fill(one, [7, 3, 11])
    rows = Rows(torch.arange(6.0).view(3, 2), {"sum": torch.tensor([1.0, 2.0, 3.0])})
    one.put(slots, rows)
    found = one.rows(one.find(torch.tensor([11, 7])))
    assert found.weights_UD.tolist() == [[4, 5], [0, 1]] and found.state["sum"].tolist() == [3, 1]
    assert one.find(torch.tensor([4, 3])).tolist() == [-1, int(slots[1])] and len(one) == 3


def test_the_longest_unused_rows_are_evicted_and_never_those_in_use():
    one = cache(20)
    fill(one, range(10))
    fill(one, range(10, 20))
    assert one.choose_evicted(0).numel() == 0
    one.clock += 1
    one.use(one.find(torch.tensor([0, 1])))
    evicted = one.choose_evicted(5)
    assert sorted(one.numbers(evicted).tolist()) == [2, 3, 4, 5, 6]
    one.release(evicted)
    assert len(one) == 15 and one.choose_evicted(5).numel() == 0
    assert sorted(fill(one, range(30, 35)).tolist()) == sorted(evicted.tolist())
    one.use(one.find(torch.tensor([*range(2), *range(7, 20), *range(30, 35)])))
    with pytest.raises(ValueError, match="1 rows cannot enter a cache of 20 at once"):
        one.choose_evicted(1)


def test_dirty_rows_are_listed_by_number_until_they_are_released():
    one = cache()
    slots = fill(one, [9, 2, 5])
    one.dirty_C[slots[:2]] = True
    assert one.numbers(one.dirty_slots()).tolist() == [2, 9]
    one.release(slots[:1])
    assert one.numbers(one.dirty_slots()).tolist() == [2]
    one.clear()
    assert len(one) == 0 and one.dirty_slots().numel() == 0


def test_a_budget_for_too_few_rows_is_refused():
    with pytest.raises(SlipstreamError, match="holds fewer than 16 rows of table 'item'"):
        cache(15)
