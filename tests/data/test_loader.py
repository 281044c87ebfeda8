"""The loader gives the batches of its sampler, in order, and counts those that were used."""

import threading

import pytest
import torch

from slipstream.data.loader import PrefetchingLoader
from slipstream.data.sampler import SamplerConfig, TrainingSampler
from tests.support.data_fixtures import store_with_lengths

LENGTHS = [1, 2, 3, 4, 5, 9, 12, 30, 7, 6, 3, 15, 21, 2, 8, 11, 4, 4, 13, 5]
CONFIGS = [
    SamplerConfig(max_len=6, batch_size=4),
    SamplerConfig(max_len=8, token_budget=30, stochastic_length=1.5),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return store_with_lengths(tmp_path_factory.mktemp("loader"), LENGTHS)


def same(one, other):
    pairs = [(getattr(one, name), getattr(other, name)) for name in vars(one)]
    tensors = [(a, b) for a, b in pairs if isinstance(a, torch.Tensor)]
    dicts = [(a[key], b[key]) for a, b in pairs if isinstance(a, dict) for key in a]
    return all(torch.equal(a, b) for a, b in tensors + dicts)


def loader_threads():
    return [each for each in threading.enumerate() if each.name.startswith("slipstream-loader")]


@pytest.mark.parametrize("config", CONFIGS)
def test_batches_are_the_samplers_and_the_state_is_that_of_the_batches_used(store, config):
    plain = TrainingSampler(store, config, seed=11)
    with PrefetchingLoader(TrainingSampler(store, config, seed=11), ahead=3) as loader:
        states = []
        for _ in range(2 * plain.steps_per_epoch):
            assert loader.state_dict() == plain.state_dict()
            states.append(loader.state_dict())
            assert same(loader.next_batch(), plain.next_batch())
            assert (loader.epoch, loader.at_epoch_end) == (plain.epoch, plain.at_epoch_end)
        for state in (states[1], states[-1], states[0]):
            loader.load_state_dict(state)
            plain.load_state_dict(state)
            assert all(same(loader.next_batch(), plain.next_batch()) for _ in range(3))
            assert all(
                same(a, b)
                for a, b in zip(loader.epoch_batches(), plain.epoch_batches(), strict=True)
            )


def test_a_batch_that_was_taken_counts_only_once_it_is_marked_used(store):
    plain = TrainingSampler(store, CONFIGS[0], seed=11)
    with PrefetchingLoader(TrainingSampler(store, CONFIGS[0], seed=11)) as loader:
        first, second = loader.take(), loader.take()
        assert loader.state_dict() == plain.state_dict()
        assert same(first.batch, plain.next_batch())
        loader.mark_used(first)
        assert loader.state_dict() == plain.state_dict()
        assert same(second.batch, plain.next_batch())
        loader.mark_used(second)
        assert loader.state_dict() == plain.state_dict()


def test_batches_are_made_in_a_thread_and_never_more_than_asked(store):
    made, names = [], set()
    sampler = TrainingSampler(store, CONFIGS[0], seed=11)
    make = sampler.next_batch

    def counting():
        names.add(threading.current_thread().name)
        made.append(1)
        return make()

    sampler.next_batch = counting
    with PrefetchingLoader(sampler, ahead=2) as loader:
        assert not made, "nothing is made before the first batch is asked for"
        for taken in range(1, 6):
            loader.next_batch()
            assert taken <= len(made) <= taken + 2
    assert len(made) <= 5 + 2 and all(name.startswith("slipstream-loader") for name in names)


def test_what_the_sampler_raises_is_raised_where_the_batch_is_taken(store, monkeypatch):
    sampler = TrainingSampler(store, CONFIGS[0], seed=11)
    real = sampler._assemble
    monkeypatch.setattr(
        sampler, "_assemble", lambda plan, step: [][1] if step == 2 else real(plan, step)
    )
    with PrefetchingLoader(sampler) as loader:
        loader.next_batch()
        loader.next_batch()
        state = loader.state_dict()
        with pytest.raises(IndexError):
            loader.next_batch()
        assert loader.state_dict() == state
    assert not loader_threads()


def test_a_closed_loader_leaves_no_thread_even_after_an_interrupt(store):
    loader = PrefetchingLoader(TrainingSampler(store, CONFIGS[0], seed=11))
    with pytest.raises(KeyboardInterrupt), loader:
        loader.next_batch()
        raise KeyboardInterrupt
    assert not loader_threads()


def test_a_loader_works_at_least_one_batch_ahead(store):
    with pytest.raises(ValueError, match="at least one batch ahead, got 0"):
        PrefetchingLoader(TrainingSampler(store, CONFIGS[0], seed=11), ahead=0)


def test_merged_batches_are_those_of_a_larger_sampler(store):
    small, large = (SamplerConfig(max_len=6, batch_size=size) for size in (2, 6))
    sampler = TrainingSampler(store, large, seed=11)
    with PrefetchingLoader(TrainingSampler(store, small, seed=11), merge=3) as loader:
        assert loader.steps_per_epoch == sampler.steps_per_epoch
        for _ in range(2 * sampler.steps_per_epoch):
            ours, expected = loader.next_batch(), sampler.next_batch()
            assert torch.equal(ours.offsets_B1, expected.offsets_B1)
            assert torch.equal(ours.items_T, expected.items_T)
            assert torch.equal(ours.token_ids_T, expected.token_ids_T)
            assert ours.actions.keys() == expected.actions.keys()
            assert loader.at_epoch_end == sampler.at_epoch_end
