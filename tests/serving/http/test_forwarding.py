"""Which requests are forwarded, and what is read of them."""

import msgspec
import pytest

from slipstream.serving.http.endpoints import ENDPOINTS
from slipstream.serving.http.forwarding import (
    ASSUMED_BEHAVIOURS,
    decode_fields,
    forwarded_handlers,
    forwarded_name,
    user_of_path,
)
from slipstream.serving.router.stored_lengths import StoredLengths

OWN = {"healthz", "readyz", "metrics", "openapi", "docs", "fleet", "page"}
OWN |= {"drain", "undrain", "reload", "kill", "traffic", "rollback", "versions"}


def test_every_endpoint_of_a_router_is_forwarded_or_its_own():
    for endpoint in ENDPOINTS:
        if "router" in endpoint.roles and "instance" in endpoint.roles:
            path = endpoint.path.replace("{user}", "ann")
            named = forwarded_name(endpoint.method, path)
            assert named == (None if endpoint.name in OWN else endpoint.name)
            assert (endpoint.name in forwarded_handlers()) == (endpoint.name not in OWN)


def test_the_length_is_that_of_the_history_sent_or_last_known():
    stored = StoredLengths()
    sent = decode_fields(b'{"user": "ann", "history": {"items": [1, 2, 3]}, "other": {}}')
    assert sent.behaviours("ann", stored) == 3
    named = decode_fields(b'{"user": "ann"}')
    assert named.behaviours("ann", stored) == ASSUMED_BEHAVIOURS
    stored.note("shop␟ann", 7)
    assert named.behaviours("shop␟ann", stored) == 7
    assert named.behaviours("ann", stored) == ASSUMED_BEHAVIOURS


@pytest.mark.parametrize(
    ("body", "cost"),
    [
        (b'{"user": "u"}', 1.0),
        (b'{"user": "u", "candidates": [1, 2, 3]}', 1.0),
        (b'{"user": "u", "candidates": [%s1]}' % (b"1," * 999), 10.0),
        (b'{"user": "u", "candidates": ["a,b"]}', 1.0),
        (b'{"user": "u", "candidates": null, "retrieve": 5000}', 50.0),
        (b'{"user": "u", "retrieve": 200}', 2.0),
        (b'{"user": "u", "retrieve": 99999999999}', 100.0),
    ],
)
def test_a_request_costs_by_the_items_it_lets_score(body: bytes, cost: float):
    assert decode_fields(body).cost() == cost


def test_a_user_that_is_no_text_is_refused():
    for body in (b"{}", b'{"user": 5}', b'{"user": ""}', b'{"user": "%s"}' % (b"x" * 257)):
        with pytest.raises(msgspec.ValidationError):
            decode_fields(body)


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [
        ("POST", "/v1/rank", "rank"),
        ("GET", "/v1/rank", None),
        ("GET", "/v1/users", "users"),
        ("GET", "/v1/users/", None),
        ("GET", "/v1/users/a/b", "user"),
        ("DELETE", "/v1/users/a/b", "delete"),
        ("GET", "/v1/export/a/b", "export"),
        ("DELETE", "/v1/export/ann", None),
        ("POST", "/admin/drain", None),
    ],
)
def test_each_path_has_its_endpoint(method: str, path: str, name: str | None):
    assert forwarded_name(method, path) == name


def test_a_user_in_a_path_is_all_that_follows():
    assert user_of_path("GET", "/v1/export/a//b/") == ("export", "a//b/")
    assert user_of_path("GET", "/v1/users/..") == ("user", "..")


@pytest.mark.parametrize(
    ("path", "more", "ranks"),
    [
        ("/v1/rank", b"", True),
        ("/v1/events", b"", False),
        ("/v1/events", b', "preinfer": null', False),
        ("/v1/events", b', "preinfer": {"rank_in_ms": 120}', True),
    ],
)
def test_an_append_that_announces_a_ranking_counts_as_its_work(path, more, ranks):
    assert decode_fields(b'{"user": "ann"%s}' % more).ranks(path) == ranks
