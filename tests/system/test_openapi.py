"""The OpenAPI document against a running server: no 5xx, and every answer is as described."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from slipstream.serving.http.client import Client
from slipstream.serving.http.endpoints import DEADLINE_HEADER, openapi
from tests.support.serving_fixtures import KEY, deployment, real_deployment

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
LONG = 60.0  # seconds; only ends a test that hangs
KNOWN = requests.Session()  # sends the key: with a made-up one every request would be refused
KNOWN.headers["x-api-key"] = KEY
SEEN: Counter[tuple[str, bool]] = Counter()  # (path, whether the request had the key)
ONLY_A_KEY = {
    path
    for path, methods in openapi("router")["paths"].items()
    for operation in methods.values()
    if not operation.get("parameters") and not operation.get("requestBody")
} | {"/admin/rollback"}  # nothing to vary here
GENTLY = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    database=None,
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_deployment(tmp_path_factory.mktemp("api")) as supervisor:
        with Client(supervisor.url, KEY, deadline_ms=1_000 * LONG) as client:
            client.events(
                "0",
                [1, 2, 3],
                [1, 2, 3],
                actions={"click": [1.0, 0.0, 1.0], "like": [0.0, 0.0, 1.0]},
            )
            assert client.recommend("0", 3).items  # this user and these items exist
        yield supervisor.url
    for path in {path for path, _ in SEEN} - ONLY_A_KEY:
        assert SEEN[path, True] > 4 * SEEN[path, False], f"{path} was mostly tried without the key"


@pytest.fixture(scope="module")
def own_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A deployment that may be drained for good, in whatever order the tests run."""
    with deployment(tmp_path_factory.mktemp("drained"), instances=1) as supervisor:
        yield supervisor.url


schema = schemathesis.openapi.from_dict(openapi("router"))


@schema.exclude(path="/admin/drain").parametrize()
@GENTLY
def test_no_request_brings_the_server_down(case: Any, url: str):
    # HTTP lets clients add headers, so an unknown one is no bad data.
    checks = CHECKS[:-1] if "x-schemathesis-unknown-property" in case.headers else CHECKS
    answer = _with_time(case).call_and_validate(
        base_url=url, session=KNOWN, checks=checks, timeout=LONG
    )
    with_key = answer.request.headers.get("x-api-key") == KEY  # some cases leave it out on purpose
    SEEN[case.path, with_key] += 1
    assert with_key == (answer.status_code != 401) or case.path in ("/healthz", "/readyz")


@schema.include(path="/admin/drain").parametrize()
@settings(GENTLY, max_examples=10)
def test_a_drain_is_done_or_refused_but_never_fails(case: Any, own_url: str):
    answer = _with_time(case).call(base_url=own_url, session=KNOWN, timeout=LONG)
    assert answer.status_code in (
        (200, 400, 404, 405, 415) if answer.request.headers.get("x-api-key") == KEY else (401,)
    )


def _with_time(case: Any) -> Any:
    """A case with a long deadline instead of a short one, for which 504 is the right answer."""
    case.headers.pop("x-api-key", None)
    deadline = str(case.headers.get(DEADLINE_HEADER, ""))
    if re.fullmatch(r"[0-9.]+(e-?[0-9]+)?", deadline) and 0 < float(deadline) < 1_000 * LONG:
        case.headers[DEADLINE_HEADER] = f"{1_000 * LONG:.0f}"
    return case


def test_the_check_can_fail(tmp_path: Path):
    """A server that answers 500 is found: the stand-in fails on users called crash."""
    with deployment(tmp_path, instances=1) as supervisor:
        published = schemathesis.openapi.from_url(
            f"{supervisor.url}/openapi.json", headers={"x-api-key": KEY}
        )
        assert published.raw_schema == schema.raw_schema
        body = {"user": "crash", "candidates": [1], "history": {"items": [1], "timestamps": [1]}}
        case = published["/v1/rank"]["POST"].Case(body=body, media_type="application/json")
        with pytest.raises(FailureGroup, match="found 2 distinct failures"):
            _with_time(case).call_and_validate(session=KNOWN, checks=CHECKS, timeout=LONG)
