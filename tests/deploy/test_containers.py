"""Container file, compose file and Kubernetes manifests agree with the server and each other.

Nothing is built or applied here, for that needs a container engine and a cluster: the files are
checked by their schema and against the server's flags, paths, ports and times.
"""

import fnmatch
import re
import subprocess
from typing import Any

import pytest
import yaml

from slipstream.serving.http.endpoints import ENDPOINTS
from slipstream.serving.http.process import SECRET_VARIABLE
from slipstream.serving.supervisor import START_SECONDS, DeploymentConfig
from tests.support.deploy_files import (
    DEPLOY,
    ROOT,
    containerfile,
    document,
    documents,
    health_command,
)

SETTINGS: dict[str, Any] = document("serve.yaml")
COMPOSE: dict[str, Any] = document("compose.yaml")
KINDS = {
    "Deployment": "apps/v1",
    "Service": "v1",
    "HorizontalPodAutoscaler": "autoscaling/v2",
    "PodDisruptionBudget": "policy/v1",
    "PersistentVolumeClaim": "v1",
    "Kustomization": "kustomize.config.k8s.io/v1beta1",
}
OPEN = {each.path for each in ENDPOINTS if each.open}
UNITS = {"Mi": 1, "Gi": 1024, "m": 1}


def serve_flags() -> set[str]:
    """The flags of `slipstream serve`, as the command knows them."""
    import typer.main

    from slipstream.cli.serve_command import serve

    app = typer.Typer()
    app.command()(serve)
    command = typer.main.get_command(app)
    return {flag.removeprefix("--") for each in command.params for flag in each.opts}


def pod() -> dict[str, Any]:
    """The pod's specification."""
    found: dict[str, Any] = document("kubernetes/deployment.yaml")["spec"]["template"]["spec"]
    return found


def container() -> dict[str, Any]:
    """The only container of the pod."""
    (only,) = pod()["containers"]
    return dict(only)


def mebibytes(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(\w+)", text).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.y*ml")), ids=lambda path: path.name)
def test_every_yaml_file_parses_and_says_what_it_is(path):
    text = path.read_text(encoding="utf-8")
    assert all(each is not None for each in yaml.safe_load_all(text))
    assert max(map(len, text.splitlines())) <= 160


def test_the_settings_and_the_arguments_are_flags():
    flags = serve_flags()
    assert set(SETTINGS) <= flags
    typed = [word for word in container()["args"] if word.startswith("--")]
    assert typed and {word.removeprefix("--") for word in typed} <= flags
    (command,) = [rest for word, rest in containerfile() if word == "CMD"]
    assert set(re.findall(r"--([\w-]+)", command)) <= flags


def test_no_file_holds_a_secret():
    for path in DEPLOY.rglob("*"):
        if path.is_file():
            assert not re.search(r"\b[0-9a-f]{32}\b", path.read_text(encoding="utf-8")), path
    values = [line for line in (DEPLOY / "example.env").read_text().splitlines() if "KEY=" in line]
    assert values and all(line.endswith("=") for line in values)
    ignored = subprocess.run(["git", "check-ignore", "deploy/.env"], cwd=ROOT, capture_output=True)
    assert ignored.returncode == 0


def test_the_container_is_built_in_stages_and_runs_as_nobody_special():
    lines = containerfile()
    stages = [rest for word, rest in lines if word == "FROM"]
    assert len(stages) == 2 and all(":" in stage for stage in stages)
    users = [rest for word, rest in lines if word == "USER"]
    security = pod()["securityContext"]
    assert users == [f"{security['runAsUser']}:{security['runAsGroup']}"]
    assert security["runAsNonRoot"] and security["runAsUser"] >= 1000
    for form in ("ENTRYPOINT", "CMD"):
        (rest,) = [rest for word, rest in lines if word == form]
        assert rest.startswith("[")


def test_what_the_build_copies_exists_and_passes_the_ignore_file():
    rules = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    kept = {rule[1:] for rule in rules if rule.startswith("!")}
    for word, rest in containerfile():
        if word == "COPY" and "--from=" not in rest:
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists() and source in kept
    dropped = [rule for rule in rules if rule.startswith("**/")]
    assert any(fnmatch.fnmatch("src/slipstream/ops/_native_avx2.so", rule) for rule in dropped)


def test_ports_and_paths_agree():
    port = SETTINGS["port"]
    assert [rest for word, rest in containerfile() if word == "EXPOSE"] == [str(port)]
    assert f":{port}/healthz" in health_command()[-1]
    assert COMPOSE["services"]["slipstream"]["ports"] == [f"{port}:{port}"]
    (job,) = document("prometheus/prometheus.yml")["scrape_configs"]
    assert job["static_configs"][0]["targets"] == [f"slipstream:{port}"]
    (named,) = container()["ports"]
    assert named["containerPort"] == port
    (of_service,) = document("kubernetes/service.yaml")["spec"]["ports"]
    assert of_service["targetPort"] == named["name"]
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container()[kind]["httpGet"]
        assert probe["port"] == named["name"] and probe["path"] in OPEN


def test_the_startup_probe_waits_as_long_as_the_supervisor_does():
    probe = container()["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > 2 * START_SECONDS
    (rest,) = [rest for word, rest in containerfile() if word == "HEALTHCHECK"]
    assert int(re.search(r"start-period=(\d+)s", rest)[1]) > 2 * START_SECONDS  # type: ignore[index]


def test_the_grace_period_covers_the_drain_of_routers_and_instances():
    of_each = SETTINGS["drain-seconds"] + DeploymentConfig(1, {}).linger + 5.0
    (sleep, seconds) = container()["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    assert pod()["terminationGracePeriodSeconds"] > int(seconds) + 2 * of_each
    grace = COMPOSE["services"]["slipstream"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) > 2 * of_each


def test_memory_and_cores_suffice_for_the_settings():
    instances, host = SETTINGS["instances"], SETTINGS["host-mb"]
    (shared,) = [each for each in pod()["volumes"] if each["name"] == "shared-memory"]
    size = mebibytes(shared["emptyDir"]["sizeLimit"])
    assert shared["emptyDir"]["medium"] == "Memory" and size >= instances * host
    limit = mebibytes(container()["resources"]["limits"]["memory"])
    assert limit >= size + instances * (SETTINGS["device-mb"] + 500)
    requests = container()["resources"]["requests"]
    assert int(requests["cpu"]) >= instances * SETTINGS["threads"]
    assert mebibytes(requests["memory"]) <= limit
    scaler = document("kubernetes/autoscaler.yaml")["spec"]["metrics"]
    busy = next(m["pods"] for m in scaler if "busy" in m["pods"]["metric"]["name"])
    assert mebibytes(busy["target"]["averageValue"]) < 1000 * instances * SETTINGS["threads"]


def test_the_manifests_are_listed_and_of_known_kinds():
    listed = document("kustomization.yaml")
    for name in [*listed["resources"], "kustomization.yaml"]:
        for each in documents(name):
            assert KINDS[each["kind"]] == each["apiVersion"], name
    files = {f"kubernetes/{path.name}" for path in (DEPLOY / "kubernetes").glob("*.yaml")}
    assert set(listed["resources"]) == files
    (settings,) = listed["configMapGenerator"]
    assert settings["files"] == ["serve.yaml"]


def test_the_manifests_fit_together():
    deployment = document("kubernetes/deployment.yaml")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert document("kubernetes/service.yaml")["spec"]["selector"] == labels
    budget = document("kubernetes/disruption-budget.yaml")
    assert budget["spec"]["selector"]["matchLabels"] == labels
    scaler = document("kubernetes/autoscaler.yaml")["spec"]
    assert scaler["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert 1 <= scaler["minReplicas"] <= scaler["maxReplicas"]
    assert "replicas" not in deployment["spec"], "the autoscaler would be overruled"
    mounts = {each["name"] for each in container()["volumeMounts"]}
    assert mounts == {each["name"] for each in pod()["volumes"]}
    claim = document("kubernetes/bundle-claim.yaml")["metadata"]["name"]
    claims = [
        each["persistentVolumeClaim"] for each in pod()["volumes"] if "bundles" in each["name"]
    ]
    assert claims == [{"claimName": claim, "readOnly": True}]


def test_paths_of_the_settings_are_mounted():
    mounted = {each["mountPath"] for each in container()["volumeMounts"]}
    of_compose = [each.split(":")[-2 if each.endswith(":ro") else -1]
                  for each in COMPOSE["services"]["slipstream"]["volumes"]]  # fmt: skip
    for place in ("/bundles", SETTINGS["state"]):
        assert place in mounted and place in of_compose
    assert SETTINGS["bundle"].startswith("/bundles/")
    args = container()["args"]
    key_file = args[args.index("--key-file") + 1]
    assert key_file.rpartition("/")[0] in mounted and {"/dev/shm", "/tmp"} <= mounted


def test_secrets_come_from_the_secret_and_keys_are_not_for_everybody():
    sources = {each["name"]: each["valueFrom"]["secretKeyRef"] for each in container()["env"]}
    assert set(sources) == {"SLIPSTREAM_HISTORY", SECRET_VARIABLE}
    (keys,) = [each["secret"] for each in pod()["volumes"] if "secret" in each]
    assert {each["name"] for each in sources.values()} == {keys["secretName"]}
    assert keys["defaultMode"] & 0o007 == 0, "the server refuses such a key file"
    assert pod()["securityContext"]["fsGroup"] == pod()["securityContext"]["runAsGroup"]


def test_compose_mounts_files_that_exist_and_publishes_only_the_server():
    for name, service in COMPOSE["services"].items():
        for volume in service.get("volumes", []):
            if volume.startswith("./"):
                assert (DEPLOY / volume.split(":")[0]).exists(), volume
        for port in service.get("ports", []):
            assert name == "slipstream" or port.startswith("127.0.0.1:")
    assert COMPOSE["secrets"]["metrics-key"]["environment"] == "SLIPSTREAM_METRICS_KEY"
    asked = set(re.findall(r"\$\{(\w+)", (DEPLOY / "compose.yaml").read_text()))
    assert asked <= set(re.findall(r"^(\w+)=", (DEPLOY / "example.env").read_text(), re.M))


def test_files_that_the_guides_hand_to_docker_kubectl_and_sbatch_exist():
    """These programs do not run here; that their files are where a page says is checked."""
    found = []
    for page in sorted((ROOT / "docs" / "guides").glob("*.md")):
        for line in re.findall(r"^ {4}((?:docker|kubectl|sbatch|cp) .*)$", page.read_text(), re.M):
            found += re.findall(r"(?:^|\s)(deploy(?:/[\w./-]+)?)(?=\s|$)", line)
    made = {"deploy/.env"}  # by the reader
    assert len(found) >= 5 and not [n for n in found if n not in made and not (ROOT / n).exists()]
