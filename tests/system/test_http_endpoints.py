"""The endpoints through a real router in front of instance processes (around the stand-in)."""

import json
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.serving.http.client import Client, RefusalError
from slipstream.serving.http.messages import Announcement, HistoryMessage
from slipstream.serving.router.ticket import TicketSigner
from slipstream.serving.supervisor import Supervisor
from tests.support.serving_fixtures import KEY, deployment
from tests.support.serving_stand_in import standin_scores

HISTORY = HistoryMessage(items=[5, 6, 7], timestamps=[10, 20, 30])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    with deployment(tmp_path_factory.mktemp("served")) as supervisor:
        with Client(supervisor.url, KEY) as opened:
            opened.events("known", [5], [10])
        yield supervisor


@pytest.fixture(scope="module")
def client(served: Supervisor) -> Iterator[Client]:
    with Client(served.url, KEY) as opened:
        yield opened


def post(url: str, body: bytes, **headers: str) -> tuple[int, dict[str, Any], Any]:
    request = urllib.request.Request(
        url, body, {"content-type": "application/json", "x-api-key": KEY, **headers}
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.loads(answer.read()), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read()), error.headers


def test_the_relay_is_handed_over_to_the_same_instance(client: Client):
    for number in range(20):
        user = f"relay-{number}"
        early = client.preinfer(user, HISTORY)
        assert early.admitted
        late = client.rank(user, [1, 2, 3], HISTORY, ticket=early.ticket)
        assert (late.instance, late.hit) == (early.instance, "device")
        assert late.scores["score"] == standin_scores([5, 6, 7], [10, 20, 30], [1, 2, 3])


def test_one_request_stores_and_announces_to_the_instance_that_ranks(client: Client):
    for number in range(10):
        user = f"told-{number}"
        client.events(user, [5, 6], [10, 20])
        stored = client.events(user, [7], [30], preinfer=Announcement(rank_in_ms=50))
        assert stored.behaviours == 3
        early = stored.preinfer
        assert early is not None and early.admitted and early.behaviours == 3
        late = client.rank(user, [1, 2], ticket=early.ticket)
        assert (late.instance, late.hit) == (early.instance, "device")
        assert late.scores["score"] == standin_scores([5, 6, 7], [10, 20, 30], [1, 2])
    assert not client.worth_announcing(early.from_behaviours - 1)
    assert client.worth_announcing(early.from_behaviours)


def test_users_are_spread_over_the_instances(client: Client):
    # A busy machine may delay a health check: the instance is back soon.
    seen, deadline = set[str](), time.monotonic() + 20
    while seen != {"i-0", "i-1"} and time.monotonic() < deadline:
        seen = {client.rank(f"spread-{number}", [1], HISTORY).instance for number in range(30)}
    assert seen == {"i-0", "i-1"}


def test_a_stored_history_scores_as_the_sent_one(client: Client):
    client.events("stored", [5, 6], [10, 20])
    early = client.preinfer("stored")
    client.events("stored", [7], [30])  # between pre-inference and ranking
    late = client.rank("stored", [1, 2], ticket=early.ticket)
    assert (late.hit, late.behaviours) == ("device", 3)
    assert late.scores["score"] == standin_scores([5, 6, 7], [10, 20, 30], [1, 2])
    without_ticket = client.rank("stored", [1, 2])
    assert without_ticket.scores == late.scores


def test_recent_behaviours_come_after_the_stored_ones(client: Client):
    client.events("recent", [5], [10])
    answer = client.rank("recent", [1], recent=HistoryMessage([6], [20]))
    assert answer.scores["score"] == standin_scores([5, 6], [10, 20], [1])
    with pytest.raises(RefusalError, match="older than stored") as refused:
        client.preinfer("recent")
        client.events("recent", [7], [30])
        early = client.preinfer("recent").ticket
        client.events("recent", [8], [40])
        client.rank("recent", [1], recent=HistoryMessage([6], [20]), ticket=early)
    assert refused.value.status == 400


def test_a_long_stored_history_is_cut_to_a_window_that_stays_put(client: Client):
    items, times = list(range(100)), list(range(100))
    client.events("long", items[:90], times[:90])
    early = client.preinfer("long")  # of 64 at most, from a multiple of 8: 32 … 90
    client.events("long", items[90:93], times[90:93])
    late = client.rank("long", [1], ticket=early.ticket)
    assert (early.behaviours, late.behaviours, late.hit) == (58, 61, "device")
    assert late.scores["score"] == standin_scores(items[32:93], times[32:93], [1])
    client.events("long", items[93:], times[93:])
    assert client.rank("long", [1]).scores["score"] == standin_scores(items[40:], times[40:], [1])


def test_items_of_another_catalogue_are_skipped_in_a_stored_history(client: Client):
    client.events("newer", [5, 10**15, 6], [1, 2, 3])
    assert client.rank("newer", [1]).scores["score"] == standin_scores([5, 6], [1, 3], [1])


def test_the_cascade_retrieves_filters_ranks_and_sorts(client: Client):
    client.events("cascade", [3, 4], [1, 2])
    answer = client.recommend("cascade", 5, exclude=[8])
    assert len(answer.items) == 5
    assert not {3, 4, 8} & set(answer.items)
    assert answer.scores["score"] == sorted(answer.scores["score"], reverse=True)
    assert answer.scores["score"] == standin_scores([3, 4], [1, 2], answer.items)
    assert answer.hit == "device"  # pre-inferred while retrieval ran
    mine = client.recommend("cascade", 5, candidates=[3, 50, 60])
    assert set(mine.items) == {50, 60}
    assert client.recommend("cascade", 5, candidates=[3]).items == []


def test_what_is_stored_can_be_read_and_does_not_go_back(client: Client):
    client.events("anno ü", [2**63 - 1, 7], [10, 20], actions={"click": [1.0, 0.0]})
    stored = client.user("anno ü")
    assert (stored.behaviours, stored.recent.items, stored.recent.actions) == (
        2,
        [2**63 - 1, 7],
        {"click": [1.0, 0.0]},
    )
    for message, sent in (
        ("send them in order", {"timestamps": [19]}),
        ("carried out before", {"timestamps": [21], "after": 1}),
    ):
        with pytest.raises(RefusalError, match=message) as refused:
            client.events("anno ü", [8], **sent)
        assert refused.value.status == 409
    assert client.events("anno ü", [8], [21], after=2).behaviours == 3
    with pytest.raises(RefusalError, match="looks like milliseconds") as refused:
        client.events("anno ü", [8], [1_710_000_000_000])
    assert refused.value.status == 400
    # An action this model does not read is kept for one that does.
    assert client.events("anno ü", [8], [22], actions={"purchase": [1.0]}).behaviours == 4
    assert client.user("anno ü", 1).recent.actions["purchase"] == [1.0]


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/rank", b"{", 400, "truncated"),
        ("/v1/rank", b"\xff\xfe", 400, "malformed"),
        ("/v1/rank", b'{"user": "\xff", "candidates": [1]}', 400, "utf-8"),
        ("/v1/rank", b"[]", 400, "object"),
        ("/v1/rank", b'{"user": "u"}', 400, "candidates"),
        ("/v1/rank", b'{"user": "", "candidates": [1]}', 400, "length"),
        ("/v1/rank", b'{"user": "u", "candidates": []}', 400, "length"),
        ("/v1/rank", b"", 400, "no body; send json like"),
        ("/v1/events", b"", 400, '"items": [2858, 1196]'),
        ("/admin/reload", b"", 400, "no body"),
        ("/v1/rank", b'{"user": "u", "candidates": [""]}', 400, "length"),
        ("/v1/events", b'{"user": "u", "items": [1], "timestamps": [1700000000000]}', 400, "milli"),
        ("/v1/rank", b'{"user": "known", "candidates": [1], "show": ["x"]}', 400, "known: parity"),
        ("/v1/rank", b'{"user": "u", "candidates": [1.5]}', 400, "int"),
        ("/v1/rank", b'{"user": "u", "candidates": [NaN]}', 400, "invalid"),
        ("/v1/rank", b'{"user": "u", "candidates": [9223372036854775808]}', 400, "<="),
        ("/v1/rank", b'{"user": "u", "candidates": [1], "histroy": {}}', 400, "unknown field"),
        (
            "/v1/rank",
            b'{"user": "u", "candidates": [1], "history": {"items": [1], "timestamps": []}}',
            400,
            "timestamps",
        ),
        (
            "/v1/rank",
            b'{"user": "u", "candidates": [1], "history": {"items": [1, 2], "timestamps": [2, 1]}}',
            400,
            "oldest first",
        ),
        ("/v1/rank", b'{"user": "never seen", "candidates": [1]}', 404, "nothing is stored"),
        ("/v1/rank", b'{"user": "u", "candidates": [' + b"1," * 999_999 + b"1]}", 400, "length"),
        (
            "/v1/rank",
            b'{"user": "u", "candidates": [' + b"123456," * 999_999 + b"1]}",
            413,
            "limit",
        ),
        ("/v1/preinfer", b'{"user": "u", "rank_in_ms": -1}', 400, ">= 0"),
        (
            "/v1/events",
            b'{"user": "u", "items": [1], "timestamps": [1], "actions": {"click": [1e999]}}',
            400,
            "number",
        ),
        (
            "/v1/rank?limt=5",
            b'{"user": "u", "candidates": [1]}',
            400,
            "unknown query parameter 'limt'",
        ),
        ("/v1/recommend", b'{"user": "u", "count": 100000}', 400, "<= 1000"),
        ("/v1/recommend", b'{"user": "known", "by": "purchase"}', 400, "no task"),
        ("/admin/drain", b'{"instance": "i-9"}', 404, "there are i-0"),
        ("/v1/nothing", b"{}", 404, "not found"),
        ("/v1/status", b"{}", 404, "not found"),
        ("/healthz", b"{}", 405, "method"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_requests_are_refused_with_a_reason(
    served: Supervisor, path: str, body: bytes, status: int, says: str
):
    code, problem, _ = post(served.url + path, body)
    assert code == status, problem
    assert says in problem["detail"].lower(), problem


@pytest.mark.parametrize("user", ["a/b", "ü ö", "a%2Fb", "..", "x/", "?&#", "line\nbreak"])
def test_a_user_of_any_name_is_stored_read_and_deleted(client: Client, user: str):
    assert client.events(user, [5, "6"], [10, 20]).behaviours == 2
    assert client.user(user).recent.items == [5, 6]
    assert client.rank(user, [1]).scores["score"] == standin_scores([5, 6], [10, 20], [1])
    assert (client.delete(user).deleted, client.delete(user).deleted) == (2, 0)
    with pytest.raises(RefusalError, match="nothing is stored"):
        client.user(user)


def test_unknown_candidates_are_reported_through_the_router(client: Client):
    answer = client.rank("u", [3, 10**15, -1, "SKU/1", "4"], HISTORY, titles=True)
    assert (answer.items, answer.unknown) == ([3, 4], [10**15, -1, "SKU/1"])
    assert answer.titles == ["item 3", None]
    assert client.rank("u", ["SKU/1"], HISTORY).scores == {"score": []}


def test_tickets_of_others_and_old_ones_rank_as_without_and_are_counted(
    served: Supervisor, client: Client
):
    expected = standin_scores([5, 6, 7], [10, 20, 30], [1])
    mine = client.preinfer("ann", HISTORY).ticket
    assert client.rank("bob", [1], HISTORY, ticket=mine).scores["score"] == expected
    secret = served._environment["SLIPSTREAM_TICKET_SECRET"].encode()
    old = TicketSigner(secret, lifetime=-1.0).issue("ann", "i-0", "v1", 0, 3)
    assert client.rank("ann", [1], HISTORY, ticket=old).scores["score"] == expected
    counted = client.metrics()
    for event in ("invalid", "expired"):
        line = rf'^slipstream_router_events_total{{event="ticket_{event}"}} [1-9]'
        assert re.search(line, counted, re.MULTILINE)


def test_requests_that_always_fail_do_not_take_the_server_from_others(client: Client):
    for _ in range(10):
        with pytest.raises(RefusalError) as refused:
            client.rank("crash", [1], HISTORY)
        assert refused.value.status == 500
    assert client.rank("ann", [1], HISTORY).scores["score"]


def test_without_the_key_everything_but_health_is_refused(served: Supervisor):
    for path in (
        "/v1/rank",
        "/v1/users/anno",
        "/metrics",
        "/openapi.json",
        "/admin/drain",
        "/nowhere",
    ):
        for key in ("", "wrong", KEY[:-1], KEY + "x"):
            code, problem, _ = post(served.url + path, b"{}", **{"x-api-key": key})
            assert (code, problem["error"]) == (401, "unauthorized")
    with urllib.request.urlopen(served.url + "/healthz", timeout=5) as answer:
        assert json.loads(answer.read()) == {"status": "ok"}


def test_instances_refuse_the_keys_of_clients(served: Supervisor):
    path = served.instances[0].url.removeprefix("unix:")
    with socket.socket(socket.AF_UNIX) as instance:
        instance.connect(path)
        instance.sendall(f"POST /v1/rank HTTP/1.1\r\nhost: x\r\nx-api-key: {KEY}\r\n\r\n".encode())
        assert instance.recv(4096).startswith(b"HTTP/1.1 401 ")


def test_refusals_of_the_model_pass_through(served: Supervisor, client: Client):
    body = json.dumps(
        {"user": "full", "candidates": [1], "history": {"items": [1], "timestamps": [1]}}
    ).encode()
    code, problem, headers = post(served.url + "/v1/rank", body)
    assert (code, problem["error"], headers["retry-after"]) == (429, "overloaded", "1")
    code, problem, _ = post(served.url + "/v1/rank", body.replace(b"full", b"crash"))
    assert (code, problem["error"]) == (500, "internal")
    assert "secret" not in json.dumps(problem)


@pytest.mark.parametrize("value", ["0", "-5", "nan", "soon", "1e9"])
def test_a_deadline_that_makes_no_sense_is_refused(served: Supervisor, value: str):
    body = b'{"user": "u", "candidates": [1], "history": {"items": [1], "timestamps": [1]}}'
    code, problem, _ = post(served.url + "/v1/rank", body, **{"x-slipstream-deadline-ms": value})
    assert code == 400
    assert "milliseconds" in problem["detail"]


def test_metrics_show_router_and_instances(client: Client):
    client.rank("measured", [1], HISTORY)
    text = client.metrics()
    assert 'slipstream_answers_total{endpoint="rank",status="200"}' in text
    assert 'slipstream_router_instance_ready{instance="i-0"} 1.0' in text
