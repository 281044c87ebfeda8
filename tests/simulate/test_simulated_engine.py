"""The simulated engine has the sizes and steps of the real one, and takes predicted time."""

import pytest

from slipstream.serving.engine.prefix import KVShape
from slipstream.simulate.simulated_engine import (
    EngineSpec,
    SimulatedEngine,
    SimulatedHistory,
    UnbackedMemory,
)
from tests.support.serving_samples import engine as real_engine
from tests.support.serving_samples import history as real_history

SPEC = EngineSpec(jitter=0.0)


def like(real) -> SimulatedEngine:
    spec = EngineSpec(
        model=real.config,
        jitter=0.0,
        tokens_per_behaviour=real.tokens_per_behaviour,
        user_tokens=real.user_tokens,
    )
    return SimulatedEngine(spec, 0)


@pytest.mark.parametrize("time_bias", ["own", "next"])
def test_sizes_and_steps_are_those_of_the_real_engine(tmp_path, time_bias):
    real = real_engine(tmp_path, max_len=300, time_bias=time_bias)
    simulated = like(real)
    assert simulated.hold == real.hold
    for length in (0, 3, 9, 60, 200):
        assert simulated.cached_tokens(length) == real.cached_tokens(length)
        assert simulated.prefix_bytes(length) == real.prefix_bytes(length)
    encoded = real.encode(real_history(200))
    buffer = real.shape.buffer(real.cached_tokens(200) + 8)
    steps = list(real.prefill_steps(encoded, buffer, None, 64))
    own = SimulatedHistory(1, 0, 200)
    unbacked = simulated.shape.buffer(buffer.capacity)
    assert list(simulated.prefill_steps(own, unbacked, None, 64)) == steps
    past, longer = simulated.prefix_of(own.part(0, 120), unbacked), own
    real_past = real.prefill(encoded.part(0, 120))
    fresh = real.shape.buffer(buffer.capacity)
    extended = list(real.prefill_steps(encoded, fresh, real_past, 64))
    assert list(simulated.prefill_steps(longer, unbacked, past, 64)) == extended


def test_a_prefill_owes_what_the_cost_model_predicts():
    engine, cost = SimulatedEngine(SPEC, 0), SPEC.cost_model()
    tokens = engine.cached_tokens(1000)
    chunk = cost.chunk_for(tokens)
    buffer = engine.shape.buffer(tokens)
    for _ in engine.prefill_steps(SimulatedHistory(1, 0, 1000), buffer, None, chunk):
        pass
    assert engine.owed == pytest.approx(cost.prefill_seconds(tokens), rel=0.02)
    engine.owed, engine.slowness = 0.0, 3.0
    for _ in engine.prefill_steps(SimulatedHistory(1, 0, 1000), buffer, None, chunk):
        pass
    assert engine.owed == pytest.approx(3 * cost.prefill_seconds(tokens), rel=0.02)


def test_histories_are_told_apart_by_user_start_and_length():
    one = SimulatedHistory(7, 0, 100)
    assert one.digest(50) == SimulatedHistory(7, 0, 60).digest(50) == one.part(0, 50).digest()
    others = [SimulatedHistory(8, 0, 50), SimulatedHistory(7, 1, 51), SimulatedHistory(7, 0, 51)]
    assert len({each.digest() for each in (*others, one.part(0, 50))}) == 4
    assert len(one.part(90)) == 10 and len(one.then(SimulatedHistory(7, 100, 106))) == 106


def test_memory_has_sizes_and_a_shelf_outlives_a_restart():
    memory = UnbackedMemory()
    arena = memory.arena(1 << 40)  # a terabyte, of which nothing is allocated
    assert arena.take(1 << 30) == 0 and arena.used == 1 << 30
    shelf = memory.open_shelf("x", 1 << 20, b"")
    offset = shelf.take(100)
    names = {"tokens": 1, "behaviours": 1, "user": b"u", "digest": b"d"}
    record = shelf.record(offset, 100, 0, **names)
    assert memory.open_shelf("x", 1 << 20, b"") is shelf and shelf.verify(record)
    shelf.remove(record)
    assert shelf.extents.used == 0 and KVShape(1, 1, 4, 4).nbytes(8) > 0
