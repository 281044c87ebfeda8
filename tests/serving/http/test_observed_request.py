"""A request's id, its user's hash, its stages: accepted, passed on, logged."""

import logging
from collections.abc import Iterator

import pytest

from slipstream.serving.http.observed_request import (
    ObservedRequest,
    Observer,
    observer,
    set_observer,
    stage_fields,
)

KEY = b"a secret of sixteen bytes or more"


def scope(**headers: bytes) -> dict[str, object]:
    pairs = [(name.replace("_", "-").encode(), value) for name, value in headers.items()]
    return {"type": "http", "headers": pairs}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (b"abc-1", True),
        (b"x" * 128, True),
        (b"x" * 129, False),
        (b"", False),
        (b"two words", False),
        (b"new\nline", False),
        ("ü".encode(), False),
    ],
)
def test_an_id_that_is_safe_to_log_is_kept_and_any_other_replaced(given: bytes, kept: bool):
    found = Observer().begin(scope(x_request_id=given), "rank").request_id
    assert (found == given.decode("utf-8")) == kept and 0 < len(found) <= 128
    assert found.isascii() and found.isprintable()


def test_ids_are_made_where_none_came_and_differ():
    made = {Observer().begin(scope(), "rank").request_id for _ in range(100)}
    assert len(made) == 100


def test_an_id_goes_on_to_the_instance_and_what_it_answers_is_read():
    observed = Observer().begin(scope(x_request_id=b"abc"), "rank")
    assert observed.forwarded() == b"x-request-id: abc\r\n"
    observed.note_answer(
        [(b"x-slipstream-hit", b"device"), (b"server-timing", b"store;dur=1.5, rank;dur=2.25")]
    )
    assert observed.hit == "device"
    assert stage_fields(observed.stages) == {"store_ms": 1.5, "rank_ms": 2.25}


def test_stages_become_a_server_timing_header():
    observed = ObservedRequest("abc")
    observed.note_stages([("store", 0.001, 0.0025), ("rank", 0.003, 0.004)])
    assert observed.stages == "store;dur=1.50, rank;dur=1.00"


@pytest.mark.parametrize(
    ("wanted", "logged"), [("none", []), ("failed", [503]), ("all", [200, 503])]
)
def test_requests_are_logged_as_wanted(wanted: str, logged: list[int], caplog):
    chosen = Observer(wanted, KEY)
    caplog.set_level(logging.INFO, "slipstream.requests")
    for status in (200, 503):
        observed = chosen.begin(scope(x_request_id=b"abc"), "rank")
        observed.user, observed.stages = "ann", "rank;dur=2.00"
        chosen.end(observed, "rank", status, 0.0125)
    fields = [record.fields for record in caplog.records]
    assert [each["status"] for each in fields] == logged
    for each in fields:
        assert (each["request_id"], each["ms"], each["rank_ms"]) == ("abc", 12.5, 2.0)
        assert each["user_hash"] == chosen.user_hash("ann") and "ann" not in str(each.values())


def test_a_users_hash_is_the_same_everywhere_and_needs_the_secret():
    one, same, other = Observer(key=KEY), Observer(key=KEY), Observer(key=b"another secret")
    assert one.user_hash("ann") == same.user_hash("ann") != other.user_hash("ann")
    assert one.user_hash("ann") != one.user_hash("bob")


@pytest.fixture
def kept_observer() -> Iterator[None]:
    before = observer()
    yield
    set_observer(before)


def test_a_process_has_one_observer(kept_observer: None):
    mine = Observer("all")
    set_observer(mine)
    assert observer() is mine
