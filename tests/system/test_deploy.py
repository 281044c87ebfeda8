"""The files of deploy/ against a running server: settings, keys, probes, scrape, health check.

The server runs as compose.yaml starts it, with the settings file, the keys and the Redis of the
files, but without a container: a bundle of its own, a free port, loopback.
"""

import http.client
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.serving.bundle import random_bundle
from slipstream.serving.http.client import Client, RefusalError
from slipstream.serving.http.messages import HistoryMessage
from tests.support.deploy_files import (
    DEPLOY,
    ROOT,
    containerfile,
    document,
    health_command,
    labels_of,
    metrics_of,
    queries,
)
from tests.support.redis_server import free_port, redis_server
from tests.support.serve_command import LONG
from tests.support.serving_fixtures import wait_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]
MODEL = {"kind": "hstu", "dim": 16, "blocks": 1, "heads": 2, "max_len": 128, "time_buckets": 16}
VARIABLES = {
    "SLIPSTREAM_CLIENT_KEY": "a key of the shop of many letters",
    "SLIPSTREAM_METRICS_KEY": "a key of prometheus alone",
    "SLIPSTREAM_ADMIN_KEY": "an operator's key of many letters",
}
# Counted from their first event on, so that a quiet server does not show them.
AT_FIRST_EVENT = {
    "slipstream_instance_overloads_total",
    "slipstream_instance_preinfer_admitted_total",
}
OF_TARGETS = {"server", "job", "pod", "namespace"}


def compose_environment() -> dict[str, str]:
    """The server's environment as compose fills it in."""
    service = document("compose.yaml")["services"]["slipstream"]

    def fill(match: re.Match[str]) -> str:
        return VARIABLES[match[1]]

    return {
        name: re.sub(r"\$\{(\w+):\?[^}]*\}", fill, value)
        for name, value in service["environment"].items()
    }


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server from deploy/serve.yaml, with compose's Redis; gives HOST:PORT."""
    place, port = tmp_path_factory.mktemp("deploy"), free_port()
    random_bundle(place / "bundle", MODEL, num_items=200, first_id=0)
    redis = document("compose.yaml")["services"]["redis"]["command"]
    words = [sys.executable, "-u", "-m", "slipstream", "serve", str(place / "bundle")]
    settings = yaml.safe_load((DEPLOY / "serve.yaml").read_text())
    settings.pop("bundle")  # a mounted one; here the argument names it
    (place / "serve.yaml").write_text(yaml.safe_dump(settings))
    words += ["--settings", str(place / "serve.yaml"), "--state", str(place / "state")]
    words += ["--host", "127.0.0.1", "--port", "0", "--deadline-ms", "60000"]
    with redis_server(place, port, *redis[1:]):
        environment = compose_environment()
        stored = environment["SLIPSTREAM_HISTORY"].replace("//redis:6379", f"//127.0.0.1:{port}")
        environment["SLIPSTREAM_HISTORY"] = stored
        with (place / "log").open("wb") as log:
            process = subprocess.Popen(words, env={**os.environ, **environment}, stdout=log)
            try:
                ready = settings["instances"] + 1
                wait_until(lambda: (place / "log").read_text().count("is ready") == ready, LONG)
                lines = map(json.loads, (place / "log").read_text().splitlines())
                urls = [re.search(r"http://[\d.:]+", line["message"]) for line in lines]
                yield urlsplit(next(url for url in urls if url)[0]).netloc
                process.send_signal(signal.SIGTERM)
                assert process.wait(LONG) == 0
            finally:
                process.kill()


def get(address: str, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
    """Status and text of a GET."""
    connection = http.client.HTTPConnection(address, timeout=LONG)
    connection.request("GET", path, headers=headers or {})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_probes_of_the_manifest_pass_without_a_key(address: str):
    (container,) = document("kubernetes/deployment.yaml")["spec"]["template"]["spec"]["containers"]
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert get(address, container[kind]["httpGet"]["path"])[0] == 200


def test_the_health_check_of_the_container_tells_life_from_death(address: str):
    python, flag, program = health_command()
    assert (python, flag) == ("python", "-c")
    for port, expected in ((address.rpartition(":")[2], 0), (str(free_port()), 1)):
        words = [sys.executable, "-c", program.replace(":8000/", f":{port}/")]
        assert subprocess.run(words, capture_output=True, timeout=LONG).returncode == expected


def scrape(address: str) -> list[Any]:
    """What Prometheus reads with the header of its file and the key of compose's secret."""
    (job,) = document("prometheus/prometheus.yml")["scrape_configs"]
    secret = Path(job["http_headers"]["x-api-key"]["files"][0]).name
    variable = document("compose.yaml")["secrets"][secret]["environment"]
    status, text = get(address, "/metrics", {"x-api-key": VARIABLES[variable]})
    assert status == 200
    return [sample for each in text_string_to_metric_families(text) for sample in each.samples]


def test_every_metric_and_label_of_the_queries_is_in_a_scrape(address: str):
    with Client(f"http://{address}", VARIABLES["SLIPSTREAM_CLIENT_KEY"]) as client:
        sent = HistoryMessage([1, 2, 3], [10, 20, 30], {"click": [0.0] * 3, "like": [0.0] * 3})
        client.rank("ann", [1, 2], history=sent)
        client.recommend("ann", history=sent, count=3)
    wait_until(lambda: any("version" in each.labels for each in scrape(address)), LONG)
    labels: dict[str, set[str]] = {}
    for sample in scrape(address):
        labels.setdefault(sample.name, set()).update(sample.labels)
    for where, query in queries().items():
        named = metrics_of(query) - {"up"} - AT_FIRST_EVENT
        shadows = {name for name in named if "_shadow_" in name}  # only while a candidate is there
        assert named - shadows <= set(labels), where
        if named and not shadows:
            here = set(itertools.chain.from_iterable(labels[name] for name in named))
            assert labels_of(query) - OF_TARGETS <= here, where


def test_the_key_of_prometheus_reads_metrics_and_nothing_else(address: str):
    with (
        Client(f"http://{address}", VARIABLES["SLIPSTREAM_METRICS_KEY"]) as client,
        pytest.raises(RefusalError) as refusal,
    ):
        client.user("ann")
    assert refusal.value.status == 403
    assert get(address, "/metrics")[0] == 401


def test_a_wheel_is_built_from_what_the_container_copies(tmp_path: Path):
    """Without the kernels, whose build tests/system/test_dist.py covers."""
    stage = list(itertools.takewhile(lambda line: "--from" not in line[1], containerfile()))
    source = tmp_path / "source"
    source.mkdir()
    for word, rest in stage:
        for name in rest.split()[:-1] if word == "COPY" else ():
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            copy(ROOT / name, source / name)
    (build,) = [rest for word, rest in stage if word == "RUN" and rest.startswith("pip wheel")]
    assert "--no-deps" in build and build.endswith(" .")
    words = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    done = subprocess.run(
        [*words, "--no-index", "--wheel-dir", str(tmp_path / "wheels"), "."],
        cwd=source,
        env={**os.environ, "SLIPSTREAM_NATIVE_LEVEL": "none"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = (tmp_path / "wheels").glob("slipstream-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.startswith("slipstream/ui/static/") for name in names)
    assert not [name for name in names if name.startswith(("deploy", "tests"))]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_renders_the_manifests(tmp_path: Path):
    """By the client alone: it gets no cluster and no account."""
    alone = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "KUBECONFIG": os.devnull}
    words = ["kubectl", "kustomize", str(DEPLOY)]
    done = subprocess.run(words, env=alone, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    made = {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}
    settings = made["ConfigMap"]
    assert yaml.safe_load(settings["data"]["serve.yaml"]) == document("serve.yaml")
    volumes = made["Deployment"]["spec"]["template"]["spec"]["volumes"]
    assert {"name": "settings", "configMap": {"name": settings["metadata"]["name"]}} in volumes
