"""Instances around random bundles, for tests of the instance and its parts."""

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from slipstream.history.user_history import History
from slipstream.serving.cache.inflight import PrefixRequest
from slipstream.serving.clock import SYSTEM_CLOCK, Clock
from slipstream.serving.engine.engine import Engine
from slipstream.serving.instance.cost_model import CostModel
from slipstream.serving.instance.instance import Instance
from slipstream.serving.instance.instance_config import InstanceConfig
from slipstream.serving.instance.trigger import TriggerConfig
from tests.support.serving_samples import engine

Answer = TypeVar("Answer")
COST = CostModel(np.array([1e-4, 2e-6, 1e-9, 1e-8]), 1e-10)
ALWAYS = TriggerConfig(enabled=False)


def instance(
    tmp_path: Path,
    cost: CostModel = COST,
    clock: Clock = SYSTEM_CLOCK,
    threaded: bool = True,
    **settings: Any,
) -> tuple[Engine, Instance]:
    """A plain engine and an instance of the same bundle, with predicted costs that are fixed."""
    served = engine(tmp_path, max_len=1000)
    settings = {"device_bytes": 32 << 20, "host_bytes": 32 << 20, "trigger": ALWAYS} | settings
    path = next(tmp_path.glob("hstu-*"))
    own_cost = CostModel(cost.coefficients, cost.copy_seconds_per_byte)
    config = InstanceConfig(**settings)
    return served, Instance(path, config, own_cost, clock, threaded=threaded)


def soon(seconds: float = 20.0) -> float:
    """A deadline."""
    return time.monotonic() + seconds


def run(coroutine: Coroutine[Any, Any, Answer]) -> Answer:
    """The result of a coroutine on a loop of its own."""
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def request_prefix(served: Instance, whole: History, user: str = "u") -> PrefixRequest:
    """What asks for the prefix of a whole history."""
    return PrefixRequest(served.engine, user, served.engine.encode(whole))


async def settle(served: Instance) -> None:
    """Wait until no prefix is being filled or copied."""
    while served.prefixes.inflight.by_key:
        await asyncio.sleep(0.002)
    await served.keep_prefixes(20)
