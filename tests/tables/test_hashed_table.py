"""A hashed table equals a table with a row for every id, reset where the hashed one forgets."""

import numpy as np
import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.tables.embedding_table import Rows, first_rows
from slipstream.tables.hashed_table import HashedTable
from slipstream.tables.memory_table import MemoryTable
from slipstream.tables.row_optimizers import DenseAdamW, RowwiseAdagrad, RowwiseAdam
from slipstream.tables.slices import slice_of


def hashed(optimizer=None, dim=4, dtype=torch.float32, **options):
    return HashedTable(
        MemoryTable("item", 16, dim, optimizer or RowwiseAdagrad(), seed=3, dtype=dtype), **options
    )


class StaticTwin:
    """A row for each of the sorted `ids`; plain sorting tells which ids the hashed table keeps."""

    def __init__(self, ids, optimizer, dim, admit_after, max_rows, evict):
        self.ids, self.admit_after, self.max_rows, self.evict = ids, admit_after, max_rows, evict
        self.table = MemoryTable("twin", len(ids), dim, optimizer)
        self.kept = np.zeros(len(ids), dtype=bool)
        self.seen, self.sightings, self.clock = (
            np.zeros(len(ids), np.int64),
            np.zeros(len(ids), np.int64),
            0,
        )
        self.reset(torch.arange(len(ids)))
        self.evictions = 0

    def reset(self, numbers):
        state = {
            k: v
            for k, v in self.table.optimizer.new_state(
                len(numbers), self.table.dim, torch.float32
            ).items()
            if v.dim()
        }
        self.table.write(
            numbers,
            Rows(
                first_rows(3, "item", self.ids[numbers], self.table.dim, 0.035, torch.float32),
                state,
            ),
        )

    def apply(self, numbers, grads, lr):
        self.clock += 1
        self.sightings[numbers] += 1
        new = ~self.kept[numbers] & (self.sightings[numbers] >= self.admit_after)
        excess = self.kept.sum() + new.sum() - (self.max_rows or len(self.ids))
        self.seen[numbers] = self.clock
        if excess > 0:
            able = np.flatnonzero(self.kept & (self.seen < self.clock))
            orders = [self.ids[able].numpy(), self.seen[able]] + (
                [self.sightings[able]] if self.evict == "lfu" else []
            )
            victims = able[np.lexsort(orders)[: max(excess, self.max_rows // 16)]]
            self.kept[victims], self.sightings[victims] = False, 0
            self.reset(torch.from_numpy(victims))
            self.evictions += len(victims)
        # An admitted id's sightings count from its admission on, as its row does.
        self.sightings[numbers[new]] = 1
        self.kept[numbers[new]] = True
        served = self.kept[numbers]
        self.table.apply(torch.from_numpy(numbers[served]), grads[torch.from_numpy(served)], lr)


@pytest.mark.parametrize(
    ("optimizer", "admit_after", "max_rows", "evict"),
    [
        (RowwiseAdam(), 1, None, "lru"),
        (RowwiseAdagrad(), 2, 0.06, "lru"),
        (RowwiseAdam(), 1, 0.05, "lfu"),
    ],
    ids=["grows", "admits and evicts lru", "evicts lfu"],
)
@pytest.mark.parametrize("count", [50_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_ids_over_the_whole_range_equal_the_static_twin(
    optimizer, admit_after, max_rows, evict, count
):
    max_rows = None if max_rows is None else int(max_rows * count)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2**63 - 1, (count,), generator=generator).unique()
    table = hashed(
        optimizer, admit_after=admit_after, max_rows=max_rows, evict=evict, max_candidates=1 << 30
    )
    twin = StaticTwin(ids, optimizer, 4, admit_after, max_rows, evict)
    order = torch.randperm(len(ids), generator=generator)
    steps = [part.sort().values for part in order.split(count // 25)]  # every id is seen
    for numbers in steps:
        often = (torch.rand(count // 125, generator=generator) ** 3 * len(ids)).long()
        numbers = torch.cat([numbers, often]).unique()  # and some again and again
        grads = torch.randn(len(numbers), 4, generator=generator)
        table.apply(ids[numbers], grads, 0.1)
        twin.apply(numbers.numpy(), grads, 0.1)
    kept = torch.from_numpy(np.flatnonzero(twin.kept))
    assert torch.equal(table._index.items()[0], ids[kept])
    assert len(table) == (len(ids) if max_rows is None else len(kept)) and (
        max_rows is None or twin.evictions > count // 20
    )
    assert torch.equal(table.gather(ids), twin.table.weights_ND)
    mine, twins = table.read(ids), twin.table.read(torch.arange(len(ids)))
    assert all(torch.equal(mine.state[name], twins.state[name]) for name in twins.state)


def test_before_admission_an_id_has_its_first_value_and_gathering_admits_nobody():
    table = hashed(RowwiseAdagrad(eps=0.0), admit_after=3, dtype=torch.float64)
    key, grads = torch.tensor([2**63 - 1]), torch.full((1, 4), 2.0, dtype=torch.float64)
    birth = first_rows(3, "item", key, 4, 0.035, torch.float64)
    for _ in range(2):
        table.apply(key, grads, 0.1)
        for _ in range(5):
            assert torch.equal(table.gather(key), birth)
            table.read(key)
        assert len(table) == 0
    table.apply(key, grads, 0.1)
    assert len(table) == 1
    assert torch.allclose(
        table.gather(key), birth - 0.1, rtol=1e-12
    )  # only the third gradient counted: a first step has size lr


def test_evicted_ids_start_afresh_and_the_least_useful_go_first():
    for evict, gone in (("lru", [10, 11]), ("lfu", [12, 13])):
        table = hashed(max_rows=4, evict=evict)
        for keys in ([10, 11], [10, 11], [12, 13]):
            table.apply(torch.tensor(keys), torch.ones(2, 4), 0.1)
        table.apply(torch.tensor([14, 15]), torch.ones(2, 4), 0.1)
        assert table._index.items()[0].tolist() == sorted({10, 11, 12, 13, 14, 15} - set(gone))
        evicted = torch.tensor(gone)
        assert torch.equal(
            table.gather(evicted), first_rows(3, "item", evicted, 4, 0.035, torch.float32)
        )
        assert not table.read(evicted).state["sum"].any()


def test_a_row_of_this_very_step_is_never_the_one_to_go():
    table = hashed(max_rows=3, evict="lfu")
    for keys in ([1, 2], [1, 2], [1, 2], [3]):
        table.apply(torch.tensor(keys), torch.ones(len(keys), 4), 0.1)
    table.apply(torch.tensor([3, 4]), torch.ones(2, 4), 0.1)  # 3 is the least used, but in use
    assert table._index.items()[0].tolist() == [2, 3, 4]


def test_candidates_are_bounded_and_the_longest_unseen_are_forgotten():
    table = hashed(admit_after=2, max_candidates=10)
    table.apply(torch.arange(8), torch.ones(8, 4), 0.1)
    table.apply(
        torch.arange(100, 105), torch.ones(5, 4), 0.1
    )  # 13 candidates: 0, 1 and 2 are forgotten
    table.apply(torch.arange(8), torch.ones(8, 4), 0.1)
    assert table._index.items()[0].tolist() == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("options", [{}, {"admit_after": 2}, {"max_rows": 300, "evict": "lfu"}])
def test_a_saved_table_goes_on_as_if_nothing_had_happened(options):
    generator = torch.Generator().manual_seed(5)
    table, copy = hashed(RowwiseAdam(), **options), hashed(RowwiseAdam(), **options)

    def steps(*tables):
        for _ in range(12):
            keys = (torch.rand(120, generator=generator) ** 2 * 2**63).long().remainder(
                2**40 + 1
            ).unique() % 900
            keys = keys.unique() * 7_919
            grads = torch.randn(len(keys), 4, generator=generator)
            for each in tables:
                each.apply(keys, grads, 0.05)

    steps(table)
    copy.load_state_dict({name: value.clone() for name, value in table.state_dict().items()})
    steps(table, copy)
    for name, value in table.state_dict().items():
        assert torch.equal(value, copy.state_dict()[name]), name


def test_touched_rows_rebuild_the_table_with_its_order_of_eviction():
    table, copy = hashed(max_rows=100), hashed(max_rows=100)
    for step in range(5):
        keys = torch.arange(20) + 20 * step
        table.apply(keys, torch.randn(20, 4), 0.1)
    chunks = list(table.touched(chunk=7))
    keys = torch.cat([keys for keys, _ in chunks])
    pairs = list(zip(slice_of(keys).tolist(), keys.tolist(), strict=True))
    assert len(pairs) == 100 and pairs == sorted(pairs)
    for part, rows in chunks:
        copy.write(part, rows)
    for each in (table, copy):
        each.apply(torch.arange(1000, 1010), torch.ones(10, 4), 0.1)
    assert (
        table._index.items()[0].tolist()
        == copy._index.items()[0].tolist()
        == [*range(10, 100), *range(1000, 1010)]
    )


def test_impossible_options_and_keys_are_refused():
    with pytest.raises(SlipstreamError, match="hashed table cannot do; use rowwise_adam"):
        hashed(DenseAdamW())
    with pytest.raises(SlipstreamError, match="raise tables"):
        hashed(max_rows=3).apply(torch.arange(4), torch.ones(4, 4), 0.1)
    for options, words in (
        ({"admit_after": 0}, "admit_after"),
        ({"max_rows": 0}, "max_rows"),
        ({"evict": "fifo"}, "lru or lfu"),
    ):
        with pytest.raises(ValueError, match=words):
            hashed(**options)
    for call in (
        lambda t, k: t.gather(k),
        lambda t, k: t.read(k),
        lambda t, k: t.apply(k, torch.ones(1, 4), 0.1),
    ):
        with pytest.raises(IndexError, match="a key is -1"):
            call(hashed(), torch.tensor([-1]))
        with pytest.raises(IndexError, match="a key is 50"):
            call(hashed(num_rows=50), torch.tensor([50]))
    with pytest.raises(ValueError, match="ask for those you need"):
        hashed().all_rows()
    assert hashed(num_rows=50).all_rows().shape == (50, 4)
    assert not hashed().forgets and hashed(max_rows=5).forgets and hashed(admit_after=2).forgets
