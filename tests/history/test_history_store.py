"""The history stores: append only, whole, exact to the last bit of an id, alike in both stores."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.errors import SlipstreamError
from slipstream.history.behaviour_blocks import CHUNK
from slipstream.history.history_store import (
    AppendError,
    HistoryStore,
    open_history_store,
    url_without_password,
)
from slipstream.history.user_history import History
from tests.support.history_stores import LATER, behaviours, columns, run

INT64_MAX, INT64_MIN = 2**63 - 1, -(2**63)
ids = {
    "numbers": st.integers(INT64_MIN, INT64_MAX),
    "text": st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
}


def test_what_was_appended_is_read_back_exactly(url: str):
    async def work(store: HistoryStore):
        assert await store.read("ann", 10) is None
        first = behaviours([INT64_MAX, 2**53 + 1], [-5, INT64_MAX - 1], click=[1.0, 0.25])
        assert await store.append("ann", first, now=LATER) == 2
        second = behaviours([INT64_MIN], [INT64_MAX], like=[1.0])
        assert await store.append("ann", second, now=LATER) == 3
        assert await store.append("bob", behaviours([1], [1])) == 1
        return await store.read("ann", 10)

    found = run(url, work)
    assert found.items.tolist() == [INT64_MAX, 2**53 + 1, INT64_MIN]
    assert found.items.dtype == np.int64 and found.timestamps.dtype == np.int64
    assert found.timestamps.tolist() == [-5, INT64_MAX - 1, INT64_MAX]
    assert {name: values.tolist() for name, values in found.actions.items()} == {
        "click": [1, 0.25, 0],
        "like": [0, 0, 1],
    }
    assert all(values.dtype == np.float32 for values in found.actions.values())
    assert (found.first, found.total) == (0, 3)
    found.items[0] = found.timestamps[0] = 1  # what is read belongs to the reader


@pytest.mark.parametrize("kind", ["numbers", "text"])
@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_histories_of_each_kind_of_id_come_back_as_they_went(url: str, kind: str, data):
    names = data.draw(st.lists(st.text(st.characters(codec="utf-8"), min_size=1), max_size=3))
    user = data.draw(ids["text"])
    value = st.floats(width=32, allow_nan=False)
    parts, clock = [], INT64_MIN
    for _ in range(data.draw(st.integers(1, 4))):
        items = data.draw(st.lists(ids[kind], min_size=1, max_size=6))
        times = sorted(data.draw(st.integers(clock, INT64_MAX)) for _ in items)
        clock = times[-1]
        kept = data.draw(st.sets(st.sampled_from(names))) if names else set()
        actions = {name: [data.draw(value) for _ in items] for name in kept}
        parts.append((items, times, actions))

    async def work(store: HistoryStore):
        await store.delete(user)
        for items, times, actions in parts:
            await store.append(user, behaviours(items, times, **actions), now=LATER)
        return await store.read(user, 100)

    items, times, actions = columns(run(url, work))
    assert items == [item for part in parts for item in part[0]]
    assert {type(item) for item in items} == {int if kind == "numbers" else str}
    assert times == [time for part in parts for time in part[1]]
    zeros = {name: [] for name in names}
    for part in parts:
        for name, column in zeros.items():
            column += part[2].get(name, [0.0] * len(part[0]))
    assert actions == {name: column for name, column in zeros.items() if any(column)}


def test_the_newest_and_those_from_a_number_on(url: str):
    async def work(store: HistoryStore):
        for begin in range(0, 5000, 700):
            await store.append("ann", behaviours(list(range(begin, min(begin + 700, 5000)))))
        newest, later, all_ = (
            await store.read("ann", 10),
            await store.read("ann", 10, since=4000),
            await store.read("ann", 10**6),
        )
        assert (newest.first, newest.items.tolist()) == (4990, list(range(4990, 5000)))
        assert (later.first, later.items.tolist()) == (4000, list(range(4000, 5000)))
        assert (all_.first, all_.items.tolist()) == (0, list(range(5000)))
        for limit in (0, 1, 1023, 1024, 1025, 4999, 5000, 5001):
            expected = list(range(max(0, 5000 - limit), 5000))
            assert (await store.read("ann", limit)).items.tolist() == expected
        for since in (0, 1023, 1024, 1025, 4999, 5000, 10**9):
            read = await store.read("ann", 1, since=since)
            assert (read.first, read.total) == (min(since, 5000), 5000)
            assert read.items.tolist() == list(range(since, 5000))
        assert all_.part(10, 12).items.tolist() == [10, 11]

    run(url, work)


def test_many_small_appends_read_as_one_history(url: str):
    async def work(store: HistoryStore):
        for number in range(2 * CHUNK + 100):
            await store.append("ann", behaviours([number], click=[number % 2]), after=number)
        return await store.read("ann", 10**6)

    found = run(url, work)
    assert found.items.tolist() == found.timestamps.tolist() == list(range(2 * CHUNK + 100))
    assert found.actions["click"].tolist() == [number % 2 for number in range(2 * CHUNK + 100)]


@pytest.mark.parametrize("at_once", [500, 3, 1500])
def test_the_oldest_are_forgotten_and_numbers_stay(url: str, at_once: int):
    async def work(store: HistoryStore):
        for begin in range(0, 6_000, at_once):
            total = await store.append("ann", behaviours(list(range(begin, begin + at_once))))
            assert total == begin + at_once
        return await store.read("ann", 10**6)

    found = run(url, work, keep=2_000)
    assert found.total == 6_000
    assert 2_000 <= len(found.items) < 2_000 + CHUNK
    assert found.items.tolist() == list(range(found.first, 6_000))


def test_time_does_not_go_back_and_nothing_is_appended_twice(url: str):
    async def work(store: HistoryStore):
        await store.append("ann", behaviours([1, 2], [-100, -50]))
        with pytest.raises(AppendError, match="-50 is stored already"):
            await store.append("ann", behaviours([3], [-51]))
        assert await store.append("ann", behaviours([3], [-50]), after=2) == 3
        with pytest.raises(AppendError, match="3 behaviours are stored, not 2"):
            await store.append("ann", behaviours([3], [-50]), after=2)
        with pytest.raises(AppendError, match="0 behaviours are stored, not 1"):
            await store.append("bob", behaviours([3], [-50]), after=1)
        assert await store.append("ann", behaviours([]), after=3) == 3
        assert await store.append("bob", behaviours([])) == 0
        assert await store.read("bob", 10) is None
        return (await store.read("ann", 10)).items.tolist()

    assert run(url, work) == [1, 2, 3]


def test_a_user_has_one_kind_of_ids_and_a_bounded_number_of_actions(url: str):
    async def work(store: HistoryStore):
        await store.append("ann", behaviours([1]))
        with pytest.raises(AppendError, match="whole numbers, but text was sent"):
            await store.append("ann", behaviours(["a/b"], [5]))
        await store.append("bob", behaviours(["1"]))
        with pytest.raises(AppendError, match="are text, but whole numbers was sent"):
            await store.append("bob", behaviours([1]))
        await store.append("ann", behaviours([2], **{f"a{n}": [1.0] for n in range(64)}))
        with pytest.raises(AppendError, match="64 different actions"):
            await store.append("ann", behaviours([3], other=[1.0]))
        assert await store.delete("ann") == 2
        await store.append("ann", behaviours(["now text"], other=[1.0]))
        return await store.read("ann", 9), await store.read("bob", 9)

    ann, bob = run(url, work)
    assert columns(ann) == (["now text"], [0], {"other": [1.0]})
    assert columns(bob) == (["1"], [0], {})


def test_times_in_milliseconds_are_refused(url: str):
    async def work(store: HistoryStore):
        with pytest.raises(AppendError, match="1710000000000 looks like milliseconds"):
            await store.append("ann", behaviours([1], [1_710_000_000_000]))
        with pytest.raises(AppendError, match=r"user 'ann': .*looks like milliseconds"):
            await store.import_histories([("ann", behaviours([1], [1_710_000_000_000]))])
        return await store.users()

    assert run(url, work) == []


AWKWARD = ["-5", "42", "a/b", "a}b{", "ann", "ann ü", "c:d", "日本", "𝄞", "%2F*?[x]", "x" * 256]


def test_awkward_users_are_kept_apart_listed_in_order_and_deleted(url: str):
    async def work(store: HistoryStore):
        for number, user in enumerate(AWKWARD):
            await store.append(user, behaviours([number]))
        assert await store.users() == sorted(AWKWARD)
        pages, page = [], await store.users(limit=3)
        while page:
            pages += page
            page = await store.users(after=page[-1], limit=3)
        assert pages == sorted(AWKWARD)
        assert await store.users(after="b", limit=2) == ["c:d", "x" * 256]
        for number, user in enumerate(AWKWARD):
            assert (await store.read(user, 1)).items.tolist() == [number]
        for user in AWKWARD[::2]:
            assert await store.delete(user) == 1
            assert await store.delete(user) == 0
            assert await store.read(user, 1) is None
        assert await store.append("-5", behaviours([7]), after=0) == 1  # as if never known
        return await store.users()

    assert run(url, work) == sorted({*AWKWARD[1::2], "-5"})


def test_users_that_no_store_can_keep(url: str):
    async def work(store: HistoryStore):
        for user in ("", "x" * 321, "\ud800"):
            with pytest.raises(AppendError, match="a user must be"):
                await store.append(user, behaviours([1]))
            assert await store.read(user, 1) is None
            assert await store.delete(user) == 0

    run(url, work)


def test_an_import_skips_known_users_or_replaces_them_and_keeps_numbers(url: str):
    long = list(range(3000))

    async def work(store: HistoryStore):
        await store.append("ann", behaviours([1, 2]))
        new = [
            ("ann", behaviours(["x"])),
            ("bob", behaviours(long, first=70)),
            ("no", behaviours([])),
        ]
        assert await store.import_histories(new) == ["bob"]
        assert (await store.read("ann", 9)).items.tolist() == [1, 2]
        bob = await store.read("bob", 10**6)
        assert (bob.first, bob.total, bob.items.tolist()) == (70, 3070, long)
        assert await store.append("bob", behaviours([1], [5000]), after=3070) == 3071
        assert await store.import_histories(new) == []
        assert await store.import_histories(new, replace=True) == ["ann", "bob"]
        assert (await store.read("ann", 9)).items.tolist() == ["x"]
        assert (await store.read("bob", 1)).total == 3070
        return await store.users()

    assert run(url, work) == ["ann", "bob"]


def test_an_import_keeps_no_more_than_an_append(url: str):
    async def work(store: HistoryStore):
        await store.import_histories([("ann", behaviours(list(range(5000))))])
        return await store.read("ann", 10**6)

    found = run(url, work, keep=1_500)
    assert 1_500 <= len(found) < 1_500 + CHUNK and found.total == 5000
    assert found.items.tolist() == list(range(found.first, 5000))


def test_concurrent_appends_lose_and_double_nothing(url: str):
    async def work(store: HistoryStore):
        other = open_history_store(url)
        stores = [store, other]
        totals = await asyncio.gather(
            *(stores[n % 2].append("ann", behaviours([n], [5])) for n in range(300))
        )
        await other.close()
        assert sorted(totals) == list(range(1, 301))
        return sorted((await store.read("ann", 1000)).items.tolist())

    assert run(url, work) == list(range(300))


WRITER = """
import asyncio, random, sys
from slipstream.history.history_store import AppendError, open_history_store
from tests.support.history_stores import behaviours

async def work(url, writer, guarded):
    store = open_history_store(url)
    for number in range(40):
        block = behaviours([writer * 1000 + number] * 3, [5] * 3)
        while True:
            stored = await store.read("ann", 0)
            after = (stored.total if stored is not None else 0) if guarded else None
            try:
                await store.append("ann", block, after=after)
                break
            except AppendError:
                await asyncio.sleep(0.02 * random.random())
    await store.close()

asyncio.run(work(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "guarded"))
"""


@pytest.mark.system
@pytest.mark.parametrize("guarded", ["guarded", "free"])
def test_writers_in_many_processes_lose_and_double_nothing(url: str, guarded: str):
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, url, str(number), guarded])
        for number in range(3)
    ]
    assert [writer.wait(120) for writer in writers] == [0, 0, 0]
    items = run(url, lambda store: store.read("ann", 10**6)).items.reshape(-1, 3)
    assert (items == items[:, :1]).all()  # whole appends
    order = items[:, 0].tolist()
    for writer in range(3):
        own = [item for item in order if item // 1000 == writer]
        assert own == list(range(writer * 1000, writer * 1000 + 40))


def _append_until_killed(url: str, started: "multiprocessing.synchronize.Event") -> None:
    async def work() -> None:
        store = open_history_store(url)
        for number in range(10**6):
            await store.append("ann", behaviours([number] * 10, [number] * 10))
            if number == 20:
                started.set()

    asyncio.run(work())


@pytest.mark.system
def test_a_killed_writer_leaves_whole_appends(url: str):
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    process = context.Process(target=_append_until_killed, args=(url, started), daemon=True)
    process.start()
    assert started.wait(30)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    found = run(url, lambda store: store.read("ann", 10**6))
    assert len(found.items) >= 210
    assert found.items.tolist() == [
        number for number in range(len(found.items) // 10) for _ in range(10)
    ]


def test_another_model_reads_the_actions_it_knows(url: str):
    async def work(store: HistoryStore):
        await store.append("ann", behaviours([1], rating=[4.0]))
        await store.append("ann", behaviours([2], click=[1.0], **{"日本 action": [0.5]}))
        return await store.read("ann", 9)

    _, _, actions = columns(run(url, work))
    assert actions == {"rating": [4, 0], "click": [0, 1], "日本 action": [0, 0.5]}


def test_context_comes_back_by_behaviour(url: str):
    async def work(store: HistoryStore):
        first = replace(behaviours([1, 2], [1, 2]), context={"surface": ["home", None]})
        await store.append("ann", first)
        await store.append("ann", behaviours([3], [3]))
        await store.append("ann", replace(behaviours([4], [4]), context={"device": ["web"]}))
        await store.import_histories([("bob", first)])
        for labels, said in ((["home"], "1 values for 2"), ([7, 8], "a label of context must be")):
            with pytest.raises(AppendError, match=said):
                await store.append("ann", replace(first, context={"surface": labels}))
        many = {f"c{number}": ["a", "b"] for number in range(63)}
        with pytest.raises(AppendError, match="at most 64 different actions and context"):
            await store.append("ann", replace(behaviours([5, 6], [5, 6]), context=many))
        return await store.read("ann", 10), await store.read("bob", 1)

    ann, bob = run(url, work)
    assert {name: each.tolist() for name, each in ann.context.items()} == {
        "surface": ["home", "", "", ""],
        "device": ["", "", "", "web"],
    }
    assert bob.context["surface"].tolist() == [""]


def test_urls_that_name_no_store_are_explained():
    for url in ("mysql://x", "sqlite:", "history.db"):
        with pytest.raises(SlipstreamError, match="names no history store"):
            open_history_store(url)
    assert url_without_password("redis://ann:a@b@host:1/0") == "redis://host:1/0"
    assert url_without_password("sqlite:/a/b@c") == "sqlite:/a/b@c"
    with pytest.raises(SlipstreamError, match="at least 1 behaviour"):
        open_history_store("sqlite:x.db", keep=0)


def test_an_untouched_history_is_unchanged_by_storing_it(url: str):
    sent = History([3, 4], [1, 2], {"click": [1, 0]})
    run(url, lambda store: store.append("ann", sent))
    assert (sent.items, sent.timestamps, sent.actions) == ([3, 4], [1, 2], {"click": [1, 0]})
