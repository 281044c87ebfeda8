"""The router against instances that misbehave: refuse, close, hang, drain."""

import asyncio
import json
from urllib.parse import quote

import pytest

from slipstream.serving.http.limits import Limits
from slipstream.serving.router import upstream
from slipstream.serving.router.ticket import TicketSigner
from tests.support.fake_clock import FakeClock
from tests.support.fake_instances import (
    KEY,
    RANK,
    SECRET,
    SIGNER,
    Behaviour,
    FakeInstance,
    answers,
    drains,
    hangs,
    hangs_up,
    on_a_loop,
    reply,
    serving,
    talks_nonsense,
    until,
)


@pytest.fixture(autouse=True)
def patient_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take long to connect."""
    monkeypatch.setattr(upstream, "CONNECT_SECONDS", 60.0)


def forged(ticket: str) -> str:
    """Another text of the same form."""
    return ("B" if ticket[0] == "A" else "A") + ticket[1:]


@on_a_loop
async def test_the_users_instance_answers_and_the_bytes_arrive_unchanged():
    async with serving() as face:
        first, body = face.order()[0], json.dumps(RANK, indent=3).encode() + b"  "
        answer = await face.ask("/v1/rank", body, x_slipstream_deadline_ms="50000")
        assert answer == (200, {"by": first.name})
        assert first.requests[0][:2] == ("/v1/rank", body)
        headers = first.requests[0][2]
        assert 0 < int(headers["x-slipstream-deadline-ms"]) <= 50_000
        assert KEY not in headers.values()  # the instances do not get the client's key


@pytest.mark.parametrize("fault", [hangs_up, talks_nonsense, drains])
@on_a_loop
async def test_a_failing_owner_costs_no_ranking(fault: Behaviour):
    async with serving() as face:
        first, second = face.order()[:2]
        first.behaviour = fault
        for _ in range(5):
            assert await face.ask("/v1/rank", RANK) == (200, {"by": second.name})
        assert 1 <= len(first.requests) <= 3  # then the breaker is open, or the drain is known


@on_a_loop
async def test_an_owner_that_is_gone_gets_no_request_until_a_probe_finds_it_again():
    async with serving() as face:
        first, second = face.order()[:2]
        first.stop()
        await until(lambda: not face.state(first).ready)
        assert await face.ask("/v1/rank", RANK) == (200, {"by": second.name})
        await first.start()
        await until(lambda: face.state(first).ready)
        assert await face.ask("/v1/rank", RANK) == (200, {"by": first.name})


@on_a_loop
async def test_an_append_is_not_repeated_when_it_may_have_been_stored():
    async with serving() as face:
        face.order()[0].behaviour = hangs_up
        append = {"user": "ann", "items": [1], "timestamps": [1]}
        status, problem = await face.ask("/v1/events", append)
        assert (status, problem["error"]) == (502, "instance_failed")
        assert [len(fake.requests) for fake in face.order()] == [1, 0, 0]


@on_a_loop
async def test_an_append_goes_to_the_next_instance_when_it_was_surely_not_sent():
    async with serving() as face:
        first, second = face.order()[:2]
        first.stop()
        append = {"user": "ann", "items": [1], "timestamps": [1]}
        # The connection of an earlier probe may end only now: then the outcome is open.
        await until(lambda: not face.state(first).ready)
        assert await face.ask("/v1/events", append) == (200, {"by": second.name})


@on_a_loop
async def test_a_hanging_instance_is_left_at_the_deadline():
    async with serving() as face:
        face.order()[0].behaviour = hangs
        status, problem = await face.ask("/v1/rank", RANK, x_slipstream_deadline_ms="300")
        assert (status, problem["error"]) == (504, "deadline_passed")


@on_a_loop
async def test_an_instance_that_times_out_is_avoided_but_short_deadlines_do_not_count():
    async with serving() as face:
        first, second = face.order()[:2]
        face.never_answer(first)
        for _ in range(5):
            status, _ = await face.ask("/v1/rank", RANK, x_slipstream_deadline_ms="400")
            assert status == 504
        assert face.state(first).breaker.failures == 0
        for _ in range(3):
            assert (await face.ask("/v1/rank", RANK))[0] == 504
        assert await face.ask("/v1/rank", RANK) == (200, {"by": second.name})


async def is_late(fake: FakeInstance, writer: asyncio.StreamWriter) -> None:
    await reply(writer, 504, {"error": "deadline_passed", "detail": "too late"})


@on_a_loop
async def test_a_burst_of_late_answers_ejects_no_instance_but_being_late_always_does():
    async with serving() as face:
        first, second = face.order()[:2]
        face.state(second).record.at = face.router.clock.now()
        for _ in range(20):
            face.state(second).record.add(failed=False, seconds=0.005)

        async def asked(times: int, behaviour: Behaviour) -> None:
            first.behaviour = behaviour
            for _ in range(times):
                await face.ask("/v1/rank", RANK, x_slipstream_deadline_ms="450")

        await asked(10, answers)
        await asked(8, is_late)
        assert not face.state(first).breaker.open
        await asked(150, is_late)
        assert face.state(first).breaker.open
        assert face.router.balancer.ejected == {"slow": 1}


@on_a_loop
async def test_a_ticket_leads_to_its_holder_until_that_one_drains():
    async with serving() as face:
        first, last = face.order()[0], face.order()[-1]
        request = {**RANK, "ticket": SIGNER.issue("ann", last.name, "v", 0, 3)}
        assert await face.ask("/v1/rank", request) == (200, {"by": last.name})
        last.draining = True
        await until(lambda: face.state(last).draining)
        assert await face.ask("/v1/rank", request) == (200, {"by": first.name})


@on_a_loop
async def test_a_ticket_without_a_prefix_leads_to_the_instance_with_the_least_to_do():
    async with serving(alone=True) as face:
        first, last = face.order()[0], face.order()[-1]
        ticket = SIGNER.issue("ann", last.name, "v", 0, 3, held=False)
        request = {**RANK, "ticket": ticket}
        assert await face.ask("/v1/rank", request) == (200, {"by": last.name})
        for each in face.order()[1:]:
            face.state(each).outstanding = 5_000
        held = {**RANK, "ticket": SIGNER.issue("ann", last.name, "v", 0, 3)}
        assert await face.ask("/v1/rank", held) == (200, {"by": last.name})
        ticket = SIGNER.issue("bob", last.name, "v", 0, 3, held=False)
        of_bob = {**RANK, "user": "bob", "ticket": ticket}
        assert await face.ask("/v1/rank", of_bob) == (200, {"by": first.name})


@on_a_loop
async def test_a_ticket_that_cannot_be_used_is_counted_and_the_request_served_without_it():
    async with serving() as face:
        first, last = face.order()[0], face.order()[-1]
        request = {"user": "ann", "history": RANK["history"]}
        ticket = SIGNER.issue("ann", last.name, "v", 0, 3)
        stale = TicketSigner(SECRET, lifetime=-1.0).issue("ann", last.name, "v", 0, 3)
        answer = await face.ask("/v1/preinfer", {**request, "ticket": ticket})
        assert answer == (200, {"by": last.name})
        of_bob = SIGNER.issue("bob", last.name, "v", 0, 3)
        for useless in (stale, forged(ticket), of_bob, "not one of ours"):
            for path, content in (("/v1/preinfer", request), ("/v1/rank", RANK)):
                answer = await face.ask(path, {**content, "ticket": useless})
                assert answer == (200, {"by": first.name})
        counts = face.router.counts
        assert (counts["ticket_expired"], counts["ticket_invalid"]) == (2, 6)


async def fails(fake: FakeInstance, writer: asyncio.StreamWriter) -> None:
    await reply(writer, 500, {"error": "internal", "detail": "it failed"})


async def refuses(fake: FakeInstance, writer: asyncio.StreamWriter) -> None:
    await reply(writer, 429, {"error": "overloaded", "detail": fake.name})


@on_a_loop
async def test_answers_of_500_open_the_breaker():
    async with serving() as face:
        first, second = face.order()[:2]
        first.behaviour = fails
        statuses = [(await face.ask("/v1/rank", RANK))[0] for _ in range(5)]
        assert statuses == [500, 500, 500, 200, 200]
        assert await face.ask("/v1/rank", RANK) == (200, {"by": second.name})


@on_a_loop
async def test_an_instance_that_is_slower_than_the_others_is_ejected():
    async def answers_slowly(fake: FakeInstance, writer: asyncio.StreamWriter) -> None:
        face.router.clock.moment += 0.4  # nobody waits: only the router's clock moves
        await answers(fake, writer)

    async with serving(clock=FakeClock()) as face:
        first, second = face.order()[:2]
        other = next(f"u{n}" for n in range(99) if face.order(f"u{n}")[0] is second)
        first.behaviour = answers_slowly
        for _ in range(6):
            await face.ask("/v1/rank", {**RANK, "user": other})
            assert (await face.ask("/v1/rank", RANK))[0] == 200
        assert await face.ask("/v1/rank", RANK) == (200, {"by": second.name})
        assert face.router.figures()["router_ejected_slow",] == 1


@on_a_loop
async def test_a_refusal_for_overload_is_tried_once_elsewhere():
    async with serving() as face:
        first, second, third = face.order()
        first.behaviour = refuses
        assert await face.ask("/v1/rank", RANK) == (200, {"by": second.name})
        second.behaviour = refuses
        status, problem = await face.ask("/v1/rank", RANK)
        assert (status, problem["detail"], third.requests) == (429, second.name, [])
        assert all(face.state(fake).breaker.failures == 0 for fake in (first, second))
    async with serving(1) as face:
        face.order()[0].behaviour = refuses
        assert (await face.ask("/v1/rank", RANK))[0] == 429


@on_a_loop
async def test_a_new_user_gets_the_idle_instance_and_keeps_it():
    async with serving(2, alone=True) as face:
        for face.state(face.order()[0]).outstanding in (1, 0):
            assert (await face.ask("/v1/rank", RANK))[1]["by"] == face.order()[1].name


@on_a_loop
async def test_a_stored_user_counts_the_length_that_answers_told():
    async def knows(fake: FakeInstance, writer: asyncio.StreamWriter) -> None:
        await reply(writer, 200, {"by": fake.name}, x_slipstream_behaviours="3000")

    async with serving(4, long_from=1_000) as face:
        for number, instance in enumerate(face.router.balancer.instances):
            instance.pool = "long" if number < 2 else "short"
        for fake in face.fakes.values():
            fake.behaviour = knows
        by = [(await face.ask("/v1/rank", {"user": "ann", "candidates": [1]}))[1]["by"]]
        by += [(await face.ask("/v1/preinfer", {"user": "ann"}))[1]["by"]]
        assert [name in ("i-0", "i-1") for name in by] == [False, True]
        append = {"user": "bob", "items": [1], "timestamps": [1]}
        await face.ask("/v1/events", append)  # its answer tells the length too
        _, answer = await face.ask("/v1/rank", {"user": "bob", "candidates": [1]})
        assert answer["by"] in ("i-0", "i-1")


@on_a_loop
async def test_an_owner_with_a_long_backlog_is_relieved_until_it_is_gone():
    async with serving(slack_behaviours=100) as face:
        first, second = face.order()[:2]
        first.backlog = 50_000
        await face.ask("/v1/rank", RANK)  # its answer reports the backlog
        assert await face.ask("/v1/preinfer", RANK) == (200, {"by": second.name})
        first.backlog = 0
        await until(lambda: face.state(first).reported == 0)  # by a probe
        assert await face.ask("/v1/preinfer", RANK) == (200, {"by": first.name})


@on_a_loop
async def test_a_burst_of_one_user_spreads_before_any_answer():
    released = asyncio.Event()

    async def answers_late(fake: FakeInstance, writer: asyncio.StreamWriter) -> None:
        await released.wait()
        await answers(fake, writer)

    async with serving(4, slack_behaviours=0) as face:
        fakes = face.fakes.values()
        for fake in fakes:
            fake.behaviour = answers_late
        burst = [asyncio.create_task(face.ask("/v1/preinfer", RANK)) for _ in range(40)]
        await until(lambda: sum(len(fake.requests) for fake in fakes) == 40)
        assert max(len(fake.requests) for fake in fakes) <= 1.25 * 40 / 4 + 1
        released.set()
        assert {status for status, _ in await asyncio.gather(*burst)} == {200}
        assert [instance.outstanding for instance in face.router.balancer.instances] == [0] * 4


@on_a_loop
async def test_without_any_instance_the_answer_is_503():
    async with serving(2) as face:
        for fake in face.fakes.values():
            fake.stop()
        status, problem = await face.ask("/v1/rank", RANK)
        assert (status, problem["error"]) == (503, "unavailable")


@on_a_loop
async def test_the_rate_of_a_caller_is_limited():
    async with serving(1, Limits(deadline_ms=60_000, requests_per_second=1e-6, burst=3)) as face:
        statuses = [(await face.ask("/v1/rank", RANK))[0] for _ in range(5)]
        assert statuses == [200, 200, 200, 429, 429]


@on_a_loop
async def test_a_stored_user_is_found_by_path():
    async with serving() as face:
        owner = face.order("bo b")[0]
        assert await face.ask("/v1/users/bo b", b"", "GET") == (200, {"by": owner.name})


@on_a_loop
async def test_readiness_needs_one_instance_and_no_drain():
    async with serving(2) as face:
        assert await face.ask("/readyz", b"", "GET") == (200, {"status": "ok"})
        status, answer = await face.ask("/admin/drain", {"instance": "nobody"})
        assert (status, answer["detail"]) == (
            404,
            "no instance is called 'nobody'; there are i-0, i-1",
        )
        assert await face.ask("/admin/drain", {}) == (200, {"draining": "router"})
        assert await face.ask("/readyz", b"", "GET") == (503, {"status": "draining"})
        assert (await face.ask("/v1/rank", RANK))[0] == 200  # what still comes is served


@on_a_loop
async def test_a_wrong_method_on_a_forwarded_path_is_405():
    async with serving(1) as face:
        assert (await face.ask("/v1/rank", b"", "GET"))[0] == 405
        assert (await face.ask("/v1/users/ann", b"", "POST"))[0] == 405
        assert (await face.ask("/v1/users/", b"", "GET"))[0] == 404


@on_a_loop
async def test_a_user_of_any_name_is_read_and_deleted_at_its_own_instance():
    async with serving(3) as face:
        for user in ("ann", "a/b", "ü ö", "a%2Fb", "..", "line\nbreak"):
            place = face.order(user)[0].name
            for method in ("GET", "DELETE"):
                path = f"/v1/users/{user}"
                assert await face.ask(path, b"", method) == (200, {"by": place}), (user, method)
                assert face.fakes[place].requests[-1][0] == quote(path)


@on_a_loop
async def test_an_empty_body_is_refused_with_an_example():
    async with serving(1) as face:
        for path in ("/v1/preinfer", "/v1/rank", "/v1/recommend", "/v1/events", "/v1/explain"):
            status, problem = await face.ask(path, b"")
            assert (status, problem["error"]) == (400, "bad_request")
            assert 'no body; send JSON like {"user": "ann"' in problem["detail"]
        status, problem = await face.ask("/v1/search", b"")
        assert status == 400 and 'send JSON like {"query": "star wars"' in problem["detail"]


@on_a_loop
async def test_a_question_about_no_user_goes_to_any_instance_and_to_the_next_if_that_fails():
    async with serving(2) as face:
        first = (await face.ask("/v1/search", {"query": "toy"}))[1]["by"]
        assert (await face.ask("/v1/search", {"query": "toy"}))[1]["by"] == first
        face.fakes[first].stop()
        assert (await face.ask("/v1/search", {"query": "toy"}))[1]["by"] != first
        assert (await face.ask("/v1/users", b"", "GET"))[0] == 200
