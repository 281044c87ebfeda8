"""`slipstream serve` and `slipstream client` as a user types them; answers equal the full pass."""

import signal
from collections.abc import Callable
from pathlib import Path

from benchmarks.serving.bundle import random_bundle
from slipstream.serving.http.client import Client
from tests.support.serve_command import ADMIN, KEY, LONG, Slipstream, figure, served, slipstream
from tests.support.served_scores import as_message, full_pass
from tests.support.serving_fixtures import wait_until
from tests.support.serving_samples import FIRST_ID, candidates, engine, history

__all__ = ["slipstream"]


def test_a_bundle_is_served_ranked_reloaded_and_ended(tmp_path: Path, slipstream: Slipstream):
    model = engine(tmp_path, max_len=400)
    bundle = next(path for path in tmp_path.iterdir() if (path / "bundle.json").exists())
    whole, wanted = history(300, age=0), candidates(60).tolist()
    sent, expected = as_message(whole), full_pass(model, whole, wanted)
    state = tmp_path / "state"
    with (
        served(bundle, "--state", str(state)) as (url, process),
        Client(url, KEY) as client,
        Client(url, ADMIN) as admin,
    ):
        assert (state / "ticket.key").exists()
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
        words = ("client", "events", "carl", str(FIRST_ID), "--actions", "click=1")
        _, shown = slipstream(*words, **environment)
        assert "1 behaviours of carl are stored" in shown and "pre-inference" not in shown
        _, shown = slipstream(*words, "--rank-in-ms", "120", **environment)
        assert "2 behaviours of carl are stored" in shown
        assert "pre-inference: not admitted" in shown  # so few behaviours gain nothing
        code, shown = slipstream("client", "user", "nobody", **environment)
        assert (code, "nothing is stored of this user" in shown) == (1, True)
        code, shown = slipstream("client", "user", "bob", SLIPSTREAM_URL=url)
        assert (code, "401" in shown) == (1, True)
        _retrain(bundle)
        assert "403" in slipstream("client", "reload", **environment)[1]
        operator = {**environment, "SLIPSTREAM_ADMIN_KEY": ADMIN}
        assert "is draining" in slipstream("client", "drain", "i-0", **operator)[1]
        assert "takes requests again" in slipstream("client", "undrain", "i-0", **operator)[1]
        changed = admin.reload()
        assert changed.before["i-0"] == model.version != changed.after["i-0"]
        again = client.rank("bob", wanted)
        assert again.version == changed.after["i-0"]
        assert again.scores != expected
        assert admin.reload().before == admin.reload().after
        _try_a_canary(bundle, admin, lambda *words: slipstream("client", *words, **operator))
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG) == 0


def test_prefixes_outlive_a_supervisor_that_was_killed(tmp_path: Path):
    model = engine(tmp_path, max_len=400)
    bundle = next(path for path in tmp_path.iterdir() if (path / "bundle.json").exists())
    whole, wanted = history(300, age=0), candidates(60).tolist()
    sent, expected = as_message(whole), full_pass(model, whole, wanted)
    # Without the trigger: of so small a model it may say that no prefix is worth its place.
    state = ("--state", str(tmp_path / "state"), "--no-trigger")
    with served(bundle, *state) as (url, process), Client(url, KEY) as client:
        assert client.rank("ann", wanted, sent).scores == expected
        wait_until(lambda: "slipstream_instance_demoted_total{" in client.metrics(), LONG)
        process.kill()
    with served(bundle, *state) as (url, _), Client(url, KEY) as client:
        again = client.rank("ann", wanted, sent)
        assert (again.hit, again.scores) == ("host", expected)


def _try_a_canary(bundle: Path, client: Client, run: Callable[..., tuple[int, str]]) -> None:
    """A candidate for half of the users, compared in the shadow, promoted, taken back."""
    wanted = candidates(60).tolist()
    (before,) = {record.stable for record in client.versions().instances.values()}
    description = bundle / "bundle.json"
    description.rename(bundle / "kept.json")
    description.write_text("{")  # a bundle that cannot be opened changes nothing
    code, said = run("reload")
    assert (code, "not the description of a bundle" in said) == (1, True)
    assert client.rank("bob", wanted).version == before
    _retrain(bundle, seed=2)
    code, said = run("reload", "--share", "0.5", "--shadow", "1")
    assert code == 0 and "for 50.0% of the users, 100.0% in the shadow" in said
    sent = as_message(history(40, age=0))
    served_to = {f"u{n}": client.rank(f"u{n}", wanted, sent).version for n in range(20)}
    assert len(set(served_to.values())) == 2 and before in served_to.values()
    candidate = (set(served_to.values()) - {before}).pop()
    again = {user: client.rank(user, wanted, sent).version for user in served_to}
    assert again == served_to, "a user keeps the version"
    assert candidate in run("versions")[1]
    compared = "slipstream_instance_shadow_compared_total"
    wait_until(lambda: figure(client.metrics(), compared) > 0, LONG)
    assert run("promote")[0] == 0
    assert {client.rank(user, wanted, sent).version for user in served_to} == {candidate}
    assert run("rollback")[0] == 0
    assert {client.rank(user, wanted, sent).version for user in served_to} == {before}


def _retrain(bundle: Path, seed: int = 1) -> None:
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
    random_bundle(
        bundle, model, num_items=300, first_id=FIRST_ID, noise=0.05, seed=seed, **features
    )  # type: ignore[arg-type]


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
