"""The instance as a Ray Serve deployment: users keep their replica, scores equal the full pass."""

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from slipstream.serving.http.messages import (
    PreinferAnswer,
    PreinferRequest,
    RankAnswer,
    RankRequest,
)
from tests.support.served_scores import as_message, full_pass
from tests.support.serving_samples import candidates, engine, history

pytestmark = pytest.mark.system


def test_users_keep_their_replica_and_scores_are_exact(tmp_path: Path):
    ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
    from ray import serve

    from slipstream.serving.ray import relay_app

    oracle = engine(tmp_path, max_len=400)
    bundle = next(path for path in tmp_path.iterdir() if (path / "bundle.json").exists())
    whole, wanted = history(200, age=0), candidates(40).tolist()
    sent, expected = as_message(whole), full_pass(oracle, whole, wanted)
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
        serve.start(proxy_location="Disabled")  # requests come by handle: nothing listens
        handle = serve.run(
            relay_app(str(bundle), history=store, replicas=2, deadline_ms=60_000, model=model)
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
