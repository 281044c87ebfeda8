"""Prefixes in fewer bits through `slipstream serve --kv`: a hit, an extension, a reload agree."""

import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.serving.bundle import random_bundle
from slipstream.history.user_history import History
from slipstream.ops.kv_precision import KVPrecision
from slipstream.serving.engine.engine import Engine
from slipstream.serving.http.client import Client
from slipstream.serving.http.messages import RankAnswer
from tests.support.serve_command import KEY, served
from tests.support.serving_fixtures import wait_until

MODEL = {"kind": "hstu", "dim": 32, "blocks": 2, "heads": 2, "max_len": 512, "time_buckets": 32}
BEHAVIOURS, OTHERS = 300, 16  # users beyond what 1 MiB of the device holds
CANDIDATES = list(range(100, 140))
LARGEST = {"fp16": 2e-3, "int8": 3e-2}  # of a bundle whose random weights feel everything


def behaviours_of(seed: int) -> History:
    rng = np.random.default_rng(seed)
    actions = {name: (rng.random(BEHAVIOURS) < 0.4).astype(float) for name in ("click", "like")}
    times = 1_600_000_000 + np.cumsum(rng.integers(1, 90_000, BEHAVIOURS))
    return History(rng.integers(0, 1_000, BEHAVIOURS), times, actions)


def append(client: Client, user: str, history: History, begin: int, end: int) -> None:
    client.events(
        user,
        history.items[begin:end].tolist(),
        history.timestamps[begin:end].tolist(),
        actions={name: values[begin:end].tolist() for name, values in history.actions.items()},
    )


def rank_until(client: Client, user: str, hit: str) -> RankAnswer:
    """Rank until the answer was found there: copies to the host tier happen a little later."""
    end = time.monotonic() + 30
    while True:
        answer = client.rank(user, CANDIDATES)
        if answer.hit == hit:
            return answer
        assert time.monotonic() < end, f"{user} was never ranked from '{hit}'"
        time.sleep(0.05)


def host_reloads(client: Client) -> float:
    """Prefixes that were filled from the host tier, whole or extended."""
    names = ("instance_prefixes_reloaded", "instance_prefixes_extended_from_host")
    lines = client.metrics().splitlines()
    found = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return sum(float(value) for name, value in found if any(each in name for each in names))


@pytest.mark.parametrize("precision", [pytest.param("fp16", marks=pytest.mark.slow), "int8"])
def test_hit_extension_and_reload_give_the_scores_of_the_full_pass(
    tmp_path: Path, precision: KVPrecision
):
    bundle = tmp_path / "bundle"
    random_bundle(bundle, MODEL, num_items=1_000, first_id=0, noise=0.05)
    whole = behaviours_of(0)
    options = ("--history", f"sqlite:{tmp_path / 'h.db'}", "--kv", precision, "--no-trigger")
    with (
        served(bundle, *options, "--device-mb", "1", "--host-mb", "8") as (url, _),
        Client(url, KEY, deadline_ms=30_000) as client,
    ):
        append(client, "ann", whole, 0, 290)
        ticket = client.preinfer("ann").ticket
        assert client.rank("ann", CANDIDATES, ticket=ticket).hit in ("device", "joined")
        device = rank_until(client, "ann", "device")
        append(client, "ann", whole, 290, BEHAVIOURS)
        extended = client.rank("ann", CANDIDATES)
        # Copied where no request came for a second; else others might evict it before.
        wait_until(lambda: "slipstream_instance_demoted_total{" in client.metrics(), 30)
        for number in range(1, 1 + OTHERS):
            append(client, f"user {number}", behaviours_of(number), 0, BEHAVIOURS)
            client.rank(f"user {number}", CANDIDATES)
        reloaded = client.rank("ann", CANDIDATES)
        wait_until(lambda: host_reloads(client) == 1, 30)  # the router asks now and then
    served_engine, exact = Engine(bundle, precision), Engine(bundle)
    assert (extended.hit, reloaded.hit) == ("extended", "extended")
    first = whole.part(0, 290)
    for answer, history in ((device, first), (extended, whole), (reloaded, whole)):
        for task, scores in served_engine.rank(None, history, CANDIDATES).items():
            assert answer.scores[task] == scores.tolist()
    rounded, full = (each.rank(None, whole, CANDIDATES) for each in (served_engine, exact))
    differences = [float(np.abs(rounded[task] - full[task]).max()) for task in full]
    assert 0 < max(differences) < LARGEST[precision]
