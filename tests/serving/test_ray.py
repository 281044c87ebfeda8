"""The instance as a Ray Serve deployment: users keep their replica, and the scores are those of the
full pass.
"""

import asyncio
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")

from slipstream.serving.http.messages import (
    HistoryMessage,
    PreinferAnswer,
    PreinferRequest,
    RankAnswer,
    RankRequest,
)
from tests.support.serving_samples import candidates, engine, history


def test_users_keep_their_replica_and_scores_are_exact(tmp_path: Path):
    from ray import serve

    from slipstream.serving.ray import relay_app

    oracle = engine(tmp_path, max_len=400)
    bundle = next(path for path in tmp_path.iterdir() if (path / "bundle.json").exists())
    whole, wanted = history(200, age=0), candidates(40).tolist()
    sent = HistoryMessage(
        whole.items.tolist(),
        whole.timestamps.tolist(),
        {name: values.tolist() for name, values in whole.actions.items()},
    )
    expected = {
        task: np.asarray(scores, dtype=np.float64).tolist()
        for task, scores in oracle.rank(None, whole, wanted).items()
    }
    paths = os.environ["PYTHONPATH"]
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
        log_to_driver=False,
    )
    try:
        model = {"device_bytes": 16 << 20, "calibrate_seconds": 0.2}
        store = f"sqlite:{tmp_path / 'history.db'}"
        handle = serve.run(
            relay_app(str(bundle), history=store, replicas=2, deadline_ms=10_000, model=model)
        )

        async def visit(user: str) -> tuple[str, str]:
            status, body = await handle.ask.remote(
                user, "preinfer", msgspec.json.encode(PreinferRequest(user, sent))
            )
            assert status == 202, body
            early = msgspec.json.decode(body, type=PreinferAnswer)
            request = msgspec.json.encode(RankRequest(user, wanted, sent, ticket=early.ticket))
            status, body = await handle.ask.remote(user, "rank", request)
            assert status == 200, body
            late = msgspec.json.decode(body, type=RankAnswer)
            assert late.scores == expected
            return early.instance, late.instance

        async def all_visits() -> list[tuple[str, str]]:
            return [await visit(f"user {number}") for number in range(12)]

        pairs = asyncio.run(all_visits())
        assert all(early == late for early, late in pairs)
        assert len({early for early, _ in pairs}) == 2
        status, body = asyncio.run(_ask(handle, b'{"user": "ann", "candidates": []}'))
        assert (status, b"bad_request" in body) == (400, True)
    finally:
        serve.shutdown()
        ray.shutdown()


async def _ask(handle: object, body: bytes) -> tuple[int, bytes]:
    return await handle.ask.remote("ann", "rank", body)  # type: ignore[attr-defined]
