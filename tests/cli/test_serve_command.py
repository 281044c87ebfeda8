"""What `serve` refuses before anything starts."""

import pytest

from benchmarks.serving.bundle import random_bundle
from slipstream.cli.app import run_command
from slipstream.cli.serve_command import read_keys
from slipstream.errors import SlipstreamError
from slipstream.serving import supervisor
from slipstream.serving.http.api_keys import parse_keys
from slipstream.serving.instance.instance_config import InstanceConfig

KEY = "a key of sixteen characters or more"


@pytest.fixture
def bundle(tmp_path):
    model = {"kind": "hstu", "dim": 16, "blocks": 1, "heads": 2, "max_len": 64}
    random_bundle(tmp_path / "bundle", model, num_items=3, ids=["a", "b", "c/d"])
    return tmp_path / "bundle"


def test_keys_come_from_a_file_and_those_of_operators_from_the_environment(tmp_path, monkeypatch):
    keys = write_keys(tmp_path, f"# keys\n{KEY}\n\n{KEY} 2 role=admin tenantless\n")
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "not read beside a file")
    monkeypatch.setenv("SLIPSTREAM_ADMIN_KEY", "a key of the operators")
    found = parse_keys(read_keys(keys))
    assert [(key.secret, key.role) for key in found] == [
        (KEY, "client"),
        (f"{KEY} 2 role=admin tenantless", "client"),
        ("a key of the operators", "admin"),
    ]


def test_keys_come_from_the_environment_otherwise(monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_API_KEY", f"{KEY},another {KEY}")
    assert read_keys(None) == (KEY, f"another {KEY}")


def write_keys(tmp_path, content):
    keys = tmp_path / "keys"
    keys.write_text(content)
    keys.chmod(0o600)
    return keys


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("# nothing\n", "holds no key"),
        (f"{KEY}, two\n", "without commas"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_key_file_is_one_sentence(tmp_path, content, sentence):
    if content is not None:
        write_keys(tmp_path, content)
    with pytest.raises(SlipstreamError, match=sentence):
        read_keys(tmp_path / "keys")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--host", "0.0.0.0"], "without an API key would serve anybody"),
        (["--long", "1"], "--long needs --long-from"),
        (["--tls-cert", "cert.pem"], "needs both --tls-cert and --tls-key"),
        (["--tls-cert", "cert.pem", "--tls-key", "key.pem"], "TLS key key.pem cannot be read"),
        (["--long", "1", "--long-from", "100"], "leaves at least one instance for short"),
        (["--routers", "0"], "--routers 0 needs --listen-instances"),
        (["--listen-instances", "0.0.0.0:9000"], "cannot share a history in SQLite"),
        (
            ["--listen-instances", "0.0.0.0:9000", "--history", "redis://127.0.0.1:1/0"],
            "several machines need a cluster key",
        ),
    ],
)
def test_serve_refuses_unsafe_or_impossible_flags(bundle, flags, sentence, capsys, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "")
    monkeypatch.delenv("SLIPSTREAM_CLUSTER_KEY", raising=False)
    assert run_command(["serve", str(bundle), *flags]) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("history", ["mysql://x", "redis://a:b/0", "sqlite:/proc/none/h.db"])
def test_serve_refuses_a_bad_history_store_before_it_starts(bundle, history, capsys, monkeypatch):
    monkeypatch.setattr(supervisor, "Supervisor", None)  # nothing may be started
    assert run_command(["serve", str(bundle), "--history", history]) == 1
    output = capsys.readouterr()
    assert output.err.startswith("error: ") and "serving" not in output.out


def test_a_password_is_taken_from_the_environment_and_not_from_the_command_line(
    bundle, capsys, monkeypatch
):
    url = "redis://:a-password@127.0.0.1:1/0"
    monkeypatch.setattr(supervisor, "Supervisor", None)
    monkeypatch.setattr("sys.argv", ["slipstream", "serve", str(bundle), f"--history={url}"])
    assert run_command(["serve", str(bundle), "--history", url]) == 1
    told = capsys.readouterr().err
    assert "put the address in $SLIPSTREAM_HISTORY" in told and "a-password" not in told
    monkeypatch.setattr("sys.argv", ["slipstream", "serve", str(bundle)])
    monkeypatch.setenv("SLIPSTREAM_HISTORY", url)
    monkeypatch.setattr(supervisor, "Supervisor", _Started)
    with pytest.raises(_Started):
        run_command(["serve", str(bundle)])
    assert "a-password" not in "".join(capsys.readouterr())


class _Started(Exception):
    """The supervisor was reached."""

    def __init__(self, *_arguments):
        raise self


def test_serve_refuses_a_damaged_bundle_before_it_starts(bundle, capsys, monkeypatch):
    monkeypatch.setattr(supervisor, "Supervisor", None)
    (bundle / "items.arrow").write_bytes(b"not arrow")
    assert run_command(["serve", str(bundle)]) == 1
    output = capsys.readouterr()
    assert "export the bundle again" in output.err and "serving" not in output.out


@pytest.fixture
def plans(monkeypatch):
    """What would be started, instead of starting it."""
    found = []

    class Recorder:
        url, port = "http://127.0.0.1:1", 1

        def __init__(self, plan, log):
            found.append(plan)

        def run(self):
            pass

        def stop(self, *_signal):
            pass

    monkeypatch.setattr(supervisor, "Supervisor", Recorder)
    return found


def test_flags_reach_instances_and_router(bundle, tmp_path, plans):
    where = ["serve", str(bundle), "--history", f"sqlite:{tmp_path / 'h.db'}"]
    flags = "--threads 2 --slo-ms 50 --device-mb 3 --host-mb 0 --kv int8 --no-preinfer"
    flags += " --no-trigger"
    assert run_command([*where, *flags.split()]) == 0
    assert run_command([*where, "--no-relay"]) == 0
    model = plans[0].instance_settings["model"]
    config = InstanceConfig.of(model)
    assert (config.threads, config.ranking_budget) == (2, 0.05)
    assert (config.device_bytes, config.host_bytes) == (3 << 20, 0)
    assert config.kv_precision == "int8"
    assert config.relay and not config.preinfer and not config.trigger.enabled
    assert plans[0].router_settings["affinity"]
    assert not plans[1].router_settings["affinity"]
    assert not plans[1].instance_settings["model"]["relay"]


def test_a_settings_file_says_where_the_machines_are(bundle, tmp_path, plans, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_HISTORY", "redis://127.0.0.1:1/0")
    key, peers, settings = (tmp_path / name for name in ("key", "peers.yaml", "serve.yaml"))
    key.write_text("a key that all machines of a cluster share\n")
    key.chmod(0o600)
    peers.write_text("[]")
    lines = ["listen-instances: 127.0.0.1:9000", "machine: a", f"cluster-key-file: {key}"]
    lines.append(f"peers: [{peers}, 'dns:relay.internal:9000']")
    settings.write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    assert run_command(["serve", str(bundle), "--settings", str(settings)]) == 0
    assert run_command(
        ["serve", "--instances", "0", "--peers", "peers.yaml", "--cluster-key-file", str(key)]
    ) == 0  # fmt: skip
    first, second = (plan.cluster for plan in plans)
    assert (first.machine, first.listen) == ("a", ("127.0.0.1", 9000))
    assert first.peers == (str(peers), "dns:relay.internal:9000")
    assert first.instance_key() == second.instance_key()
    assert (second.peers, plans[1].instances) == ((str(peers),), 0)
    assert not plans[0].router_settings["alone"]
