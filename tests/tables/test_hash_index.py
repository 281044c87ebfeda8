"""The native index behaves as a dictionary: growth, collisions, erased neighbours, large keys."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from slipstream.ops import native
from slipstream.tables.hash_index import NativeIndex, PlainIndex, make_index

pytestmark = pytest.mark.skipif(not native.available(), reason="native kernels are not built")
# More keys than a new index has room for.
POOL = [*range(40), *(2**63 - 1 - n for n in range(20)), 2**62, 2**32, 2**53 + 1]
KEYS = st.lists(st.sampled_from(POOL), max_size=30, unique=True).map(
    lambda keys: torch.tensor(keys, dtype=torch.int64)
)


class IndexMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.native, self.plain, self.next = NativeIndex(), PlainIndex(), 0

    @rule(keys=KEYS)
    def insert(self, keys):
        values = torch.arange(self.next, self.next + keys.numel())
        self.next += keys.numel()
        self.native.insert(keys, values)
        self.plain.insert(keys, values)

    @rule(keys=KEYS)
    def erase(self, keys):
        self.native.erase(keys)
        self.plain.erase(keys)

    @invariant()
    def equal(self):
        assert len(self.native) == len(self.plain)
        every = torch.tensor(POOL)
        assert torch.equal(self.native.find(every), self.plain.find(every))
        for mine, twins in zip(self.native.items(), self.plain.items(), strict=True):
            assert torch.equal(mine, twins)


class LongIndexMachine(IndexMachine):
    """The same with more sequences."""


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
TestLongIndexMachine = pytest.mark.slow(LongIndexMachine.TestCase)
TestLongIndexMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_a_million_random_keys():
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(2**63 - 1, (1_000_000,), generator=generator).unique()
    index = NativeIndex()
    values = torch.arange(keys.numel())
    for part, numbers in zip(keys.split(70_001), values.split(70_001), strict=True):
        index.insert(part, numbers)
    assert len(index) == keys.numel()
    shuffled = torch.randperm(keys.numel(), generator=generator)
    assert torch.equal(index.find(keys[shuffled]), shuffled)
    gone = shuffled[: keys.numel() // 2]
    index.erase(keys[gone])
    assert (index.find(keys[gone]) == -1).all()
    left = shuffled[keys.numel() // 2 :]
    assert torch.equal(index.find(keys[left]), left)
    assert (index.find(torch.randint(2**63 - 1, (100_000,), generator=generator)) == -1).all()
    index.insert(keys[gone], values[gone] + 5)
    assert torch.equal(index.find(keys[gone]), values[gone] + 5) and len(index) == keys.numel()


def test_room_is_made_beforehand_and_negative_keys_are_refused():
    index = NativeIndex(room=1000)
    before = index._pairs.data_ptr()
    index.insert(torch.arange(1000), torch.arange(1000))
    assert index._pairs.data_ptr() == before
    for either in (index, PlainIndex()):
        with pytest.raises(ValueError, match="not negative, got -3"):
            either.insert(torch.tensor([4, -3]), torch.tensor([0, 0]))
    assert isinstance(make_index(), NativeIndex)


def test_without_kernels_the_dictionary_serves(monkeypatch):
    monkeypatch.setattr("slipstream.tables.hash_index.native.available", lambda: False)
    assert isinstance(make_index(), PlainIndex)
