"""The table of endpoints, and the OpenAPI document made from it."""

import json
import re
from typing import Any

import msgspec
import pytest

from slipstream.serving.http.endpoints import DEADLINE_HEADER, ENDPOINTS, MEANING, openapi

ROLES = ["instance", "router"]


def test_names_and_paths_are_unique():
    assert len({endpoint.name for endpoint in ENDPOINTS}) == len(ENDPOINTS)
    assert len({(endpoint.method, endpoint.path) for endpoint in ENDPOINTS}) == len(ENDPOINTS)


def test_every_error_status_has_a_meaning():
    assert {status for endpoint in ENDPOINTS for status in endpoint.problems} <= set(MEANING)


@pytest.mark.parametrize("role", ROLES)
def test_the_document_lists_the_endpoints_of_its_role(role: Any):
    document = openapi(role)
    mine = [endpoint for endpoint in ENDPOINTS if role in endpoint.roles]
    assert set(document["paths"]) == {endpoint.path for endpoint in mine}
    for endpoint in mine:
        operation = document["paths"][endpoint.path][endpoint.method.lower()]
        assert operation["operationId"] == endpoint.name
        assert str(endpoint.status) in operation["responses"]
        assert ("security" in operation) == endpoint.open
        names = [parameter["name"] for parameter in operation.get("parameters", [])]
        assert (DEADLINE_HEADER in names) == endpoint.timed


def test_every_request_has_an_example_that_is_a_request():
    for endpoint in ENDPOINTS:
        document = openapi(endpoint.roles[0])
        if endpoint.request is not None:
            operation = document["paths"][endpoint.path][endpoint.method.lower()]
            example = operation["requestBody"]["content"]["application/json"]["example"]
            assert isinstance(msgspec.convert(example, endpoint.request), endpoint.request)


@pytest.mark.parametrize("role", ROLES)
def test_every_schema_the_document_refers_to_is_in_it(role: Any):
    document = openapi(role)
    named = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document)))
    assert named and named <= set(document["components"]["schemas"])
