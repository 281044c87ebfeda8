"""`slipstream serve` and `slipstream client` as a user types them; answers equal the full pass."""

import signal
from pathlib import Path

from benchmarks.serving.bundle import random_bundle
from slipstream.serving.http.client import Client
from tests.support.serve_command import KEY, LONG, Slipstream, served, slipstream
from tests.support.served_scores import as_message, full_pass
from tests.support.serving_samples import FIRST_ID, candidates, engine, history

__all__ = ["slipstream"]


def test_a_bundle_is_served_ranked_reloaded_and_ended(tmp_path: Path, slipstream: Slipstream):
    model = engine(tmp_path, max_len=400)
    bundle = next(path for path in tmp_path.iterdir() if (path / "bundle.json").exists())
    whole, wanted = history(300, age=0), candidates(60).tolist()
    sent, expected = as_message(whole), full_pass(model, whole, wanted)
    with served(bundle) as (url, process), Client(url, KEY) as client:
        early = client.preinfer("ann", sent)
        late = client.rank("ann", wanted, sent, ticket=early.ticket)
        assert late.scores == expected
        assert late.version == model.version
        client.events("bob", sent.items, sent.timestamps, actions=sent.actions)
        assert client.rank("bob", wanted).scores == expected
        best = client.recommend("bob", 5)
        assert len(best.items) == 5
        assert best.scores["click"] == sorted(best.scores["click"], reverse=True)
        assert client.rank("bob", [7]).unknown == [7]
        environment = {"SLIPSTREAM_URL": url, "SLIPSTREAM_API_KEY": KEY}
        assert slipstream("client", "health", **environment) == (0, f"{url} is ready\n")
        _, shown = slipstream(
            "client", "rank", "bob", f"{FIRST_ID},{FIRST_ID + 1}", "--relay", **environment
        )
        assert str(FIRST_ID) in shown
        assert "click" in shown
        _, shown = slipstream(
            "client", "events", "carl", str(FIRST_ID), "--actions", "click=1", **environment
        )
        assert "1 behaviours of carl are stored" in shown
        code, shown = slipstream("client", "user", "nobody", **environment)
        assert (code, "nothing is stored of this user" in shown) == (1, True)
        code, shown = slipstream("client", "user", "bob", SLIPSTREAM_URL=url)
        assert (code, "401" in shown) == (1, True)
        _retrain(bundle)
        changed = client.reload()
        assert changed.before["i-0"] == model.version != changed.after["i-0"]
        again = client.rank("bob", wanted)
        assert again.version == changed.after["i-0"]
        assert again.scores != expected
        assert client.reload().before == client.reload().after
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG) == 0


def _retrain(bundle: Path) -> None:
    """Put another model of the same size in the bundle's place, as `slipstream export` does."""
    model = {
        "kind": "hstu",
        "dim": 32,
        "blocks": 2,
        "heads": 2,
        "max_len": 400,
        "time_bias": "own",
        "divisor": 100.0,
        "time_buckets": 64,
    }
    features = {"item_features": {"genre": 7}, "user_features": {"age": 4}}
    random_bundle(bundle, model, num_items=300, first_id=FIRST_ID, noise=0.05, seed=1, **features)  # type: ignore[arg-type]


def test_mistakes_are_explained_in_a_sentence(tmp_path: Path, slipstream: Slipstream):
    assert "is not a bundle" in refused(slipstream("serve", str(tmp_path)))
    (tmp_path / "bundle.json").write_text("{}")
    serve = ("serve", str(tmp_path))
    assert "not the description of a bundle" in refused(slipstream(*serve))
    assert "without an API key would serve anybody" in refused(
        slipstream(*serve, "--host", "0.0.0.0")
    )
    assert "--long needs --long-from" in refused(slipstream(*serve, "--long", "1"))
    assert "at least 16" in refused(slipstream(*serve, SLIPSTREAM_API_KEY="short"))
    assert "cannot be read" in refused(slipstream(*serve, "--key-file", str(tmp_path / "none")))
    nowhere = "http://127.0.0.1:1"
    assert "is `slipstream serve` running there?" in refused(
        slipstream("client", "rank", "ann", "1,2", SLIPSTREAM_URL=nowhere)
    )
    assert "is not ready" in refused(slipstream("client", "health", SLIPSTREAM_URL=nowhere))
    assert "not a list of ids" in refused(
        slipstream("client", "rank", "ann", "a,,b", SLIPSTREAM_URL=nowhere)
    )


def refused(ended: tuple[int, str]) -> str:
    assert ended[0] == 1
    assert ended[1].startswith("error: ")
    return ended[1]
