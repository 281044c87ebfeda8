"""A hashed table equals a few dictionaries in plain Python, whatever is called in which order."""

import functools
import math

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from slipstream.tables.embedding_table import Rows, first_rows
from slipstream.tables.hashed_table import HashedTable
from slipstream.tables.memory_table import MemoryTable
from slipstream.tables.row_optimizers import RowwiseAdagrad

IDS = [0, 1, 2, 3, 63, 64, 2**31, 2**53 + 1, 2**62, 2**63 - 2, 2**63 - 1]
BATCH = st.lists(st.sampled_from(IDS), min_size=1, max_size=4, unique=True).map(sorted)
EPS, LR, DIM = 1e-6, 0.25, 2


@functools.cache
def birth(key):
    return first_rows(9, "t", torch.tensor([key]), DIM, 0.5, torch.float64)[0].tolist()


class HashedMachine(RuleBasedStateMachine):
    @initialize(
        admit_after=st.integers(1, 3),
        max_rows=st.sampled_from([None, 4, 6]),
        evict=st.sampled_from(["lru", "lfu"]),
        max_candidates=st.sampled_from([4, 100]),
    )
    def begin(self, admit_after, max_rows, evict, max_candidates):
        self.options = {
            "admit_after": admit_after,
            "max_rows": max_rows,
            "evict": evict,
            "max_candidates": max_candidates,
        }
        self.table = self.new_table()
        self.rows, self.past, self.waiting, self.clock = (
            {},
            {},
            {},
            0,
        )  # id -> (weights, sum); [sightings, seen]; [sightings, seen]

    def new_table(self):
        storage = MemoryTable(
            "t", 2, DIM, RowwiseAdagrad(eps=EPS), seed=9, init_scale=0.5, dtype=torch.float64
        )
        return HashedTable(storage, **self.options)

    def admit(self, new):
        max_rows = self.options["max_rows"]
        excess = len(self.rows) + len(new) - (max_rows or 10**9)
        if excess > 0:
            lru = self.options["evict"] == "lru"
            able = [key for key in self.rows if self.past[key][1] < self.clock]
            able.sort(key=lambda key: (self.past[key][1], key) if lru else (*self.past[key], key))
            for key in able[: max(excess, max_rows // 16)]:
                del self.rows[key], self.past[key]
        for key in new:
            self.rows[key], self.past[key] = (birth(key), 0.0), [1, self.clock]

    def use(self, keys):
        for key in keys:
            if key in self.rows:
                self.past[key] = [self.past[key][0] + 1, self.clock]

    @rule(keys=BATCH, values=st.lists(st.integers(-3, 3), min_size=8, max_size=8))
    def train(self, keys, values):
        grads = torch.tensor(values[: DIM * len(keys)], dtype=torch.float64).view(-1, DIM)
        self.table.apply(torch.tensor(keys), grads, LR)
        self.clock += 1
        self.use(keys)
        new = []
        for key in keys:
            if key not in self.rows:
                count = self.waiting.pop(key, [0, 0])[0] + 1
                if count >= self.options["admit_after"]:
                    new.append(key)
                else:
                    self.waiting[key] = [count, self.clock]
        excess = len(self.waiting) - self.options["max_candidates"]
        if excess > 0:
            oldest = sorted(self.waiting, key=lambda key: (self.waiting[key][1], key))
            for key in oldest[: max(excess, self.options["max_candidates"] // 16)]:
                del self.waiting[key]
        self.admit(new)
        for key, grad in zip(keys, grads.tolist(), strict=True):
            if key in self.rows:
                weights, total = self.rows[key]
                total += sum(g * g for g in grad) / DIM
                step = LR / (math.sqrt(total) + EPS)
                self.rows[key] = ([w - step * g for w, g in zip(weights, grad, strict=True)], total)

    @rule(keys=BATCH, value=st.integers(-5, 5))
    def write(self, keys, value):
        count = len(keys)
        rows = Rows(
            torch.full((count, DIM), float(value), dtype=torch.float64),
            {"sum": torch.full((count,), 2.0, dtype=torch.float64)},
        )
        self.table.write(torch.tensor(keys), rows)
        self.clock += 1
        self.use(keys)
        for key in keys:
            self.waiting.pop(key, None)
        self.admit([key for key in keys if key not in self.rows])
        for key in keys:
            self.rows[key] = ([float(value)] * DIM, 2.0)

    @rule()
    def save_and_load(self):
        saved = {name: value.clone() for name, value in self.table.state_dict().items()}
        self.table = self.new_table()
        self.table.load_state_dict(saved)

    @invariant()
    def equals_the_dictionaries(self):
        if not hasattr(self, "table"):
            return
        assert self.table._index.items()[0].tolist() == sorted(self.rows)
        got = self.table.read(torch.tensor(IDS))
        expected = [self.rows.get(key, (birth(key), 0.0)) for key in IDS]
        assert torch.allclose(
            got.weights_UD,
            torch.tensor([w for w, _ in expected], dtype=torch.float64),
            rtol=1e-12,
            atol=1e-14,
        )
        assert torch.allclose(
            got.state["sum"],
            torch.tensor([s for _, s in expected], dtype=torch.float64),
            rtol=1e-12,
        )
        assert torch.equal(self.table.gather(torch.tensor(IDS)), got.weights_UD)
        assert sorted(self.waiting) == self.table._candidates.items()[0].tolist()


class LongHashedMachine(HashedMachine):
    """The same with more and longer sequences."""


TestHashedMachine = HashedMachine.TestCase
TestHashedMachine.settings = settings(max_examples=10, stateful_step_count=20, deadline=None)
TestLongHashedMachine = pytest.mark.slow(LongHashedMachine.TestCase)
TestLongHashedMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
