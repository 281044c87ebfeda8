"""Both stores against a plain dict of lists: any order of appends, imports, reads and deletes."""

import asyncio
import tempfile
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from slipstream.history import behaviour_blocks, redis_store, sqlite_store
from slipstream.history.history_store import AppendError, HistoryStore, open_history_store
from tests.support.history_stores import behaviours, columns

KEEP, CHUNK = 12, 4  # small, so that blocks are cut, packed and forgotten all the time
USERS = st.sampled_from(["ann", "a/b", "-5", "日"])
KINDS = st.sampled_from(["numbers", "numbers", "numbers", "text"])


class StoreMachine(RuleBasedStateMachine):
    """A user of the reference: (first number, kind, [(item, time, {action: value})])."""

    url: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        url = self.url or f"sqlite:{Path(self.folder.name) / 'history.db'}"
        self.store: HistoryStore = open_history_store(url, KEEP)
        self.users: dict[str, tuple[int, str, list]] = {}
        self.clock = 0
        for user in self.do(self.store.users()):
            self.do(self.store.delete(user))

    def do(self, work):
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        self.do(self.store.close())
        self.loop.close()
        self.folder.cleanup()

    def draw_rows(self, kind: str, count: int, action: str | None) -> list:
        self.clock += 1
        numbers = range(10 * self.clock, 10 * self.clock + count)
        ids = [number if kind == "numbers" else f"i/{number}" for number in numbers]
        return [(item, self.clock, {action: 1.0} if action else {}) for item in ids]

    def history(self, rows: list, first: int = 0):
        items, times = [row[0] for row in rows], [row[1] for row in rows]
        names = {name for row in rows for name in row[2]}
        actions = {name: [row[2].get(name, 0.0) for row in rows] for name in names}
        return behaviours(items, times, first, **actions)

    @rule(
        user=USERS,
        kind=KINDS,
        count=st.integers(0, 9),
        action=st.sampled_from([None, "click", "like"]),
        guess=st.sampled_from([None, None, "right", "wrong"]),
        back=st.sampled_from([False, False, True]),
    )
    def append(self, user, kind, count, action, guess, back) -> None:
        first, known, stored = self.users.get(user, (0, kind, []))
        total, rows = first + len(stored), self.draw_rows(kind, count, action)
        if back and stored:
            rows = [(item, stored[-1][1] - 1, actions) for item, _, actions in rows]
        after = None if guess is None else total + (guess == "wrong")
        call = self.store.append(user, self.history(rows), after)
        if guess == "wrong" or (rows and (known != kind or (back and stored))):
            with pytest.raises(AppendError):
                self.do(call)
            return
        assert self.do(call) == total + count
        if rows:
            self.users[user] = (first, known, stored + rows)

    @rule(
        user=USERS,
        kind=KINDS,
        count=st.integers(1, 15),
        first=st.integers(0, 9),
        force=st.booleans(),
    )
    def import_user(self, user, kind, count, first, force) -> None:
        rows = self.draw_rows(kind, count, "imported")
        written = self.do(
            self.store.import_histories([(user, self.history(rows, first))], replace=force)
        )
        assert written == ([user] if force or user not in self.users else [])
        if written:
            self.users[user] = (first, kind, rows)

    @rule(user=USERS, limit=st.integers(0, 30), since=st.none() | st.integers(0, 60))
    def read(self, user, limit, since) -> None:
        found = self.do(self.store.read(user, limit, since))
        if user not in self.users:
            assert found is None
            return
        first, _, stored = self.users[user]
        total = first + len(stored)
        begin = total - limit if since is None else min(since, total)
        kept = self.do(self.store.read(user, 10**6)).first
        assert kept == first or total - KEEP - CHUNK < kept <= max(first, total - KEEP)
        assert (found.first, found.total) == (max(kept, begin), total)
        rows = stored[found.first - first :]
        assert columns(found) == columns(self.history(rows))

    @precondition(lambda self: len(self.users) > 1)
    @rule(user=USERS)
    def delete(self, user) -> None:
        kept = self.do(self.store.read(user, 10**6))
        assert self.do(self.store.delete(user)) == (len(kept) if kept is not None else 0)
        self.users.pop(user, None)

    @rule(after=st.none() | USERS, limit=st.integers(1, 5))
    def list_users(self, after, limit) -> None:
        expected = sorted(user for user in self.users if after is None or user > after)
        assert self.do(self.store.users(after, limit)) == expected[:limit]


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("redis", marks=pytest.mark.system)])
def test_a_store_is_a_dict_of_lists(kind: str, request: pytest.FixtureRequest, monkeypatch):
    for module in (behaviour_blocks, redis_store, sqlite_store):
        monkeypatch.setattr(module, "CHUNK", CHUNK)
    monkeypatch.setattr(redis_store, "TAIL", 3)
    url = request.getfixturevalue("redis_url") if kind == "redis" else ""
    machine = type("Machine", (StoreMachine,), {"url": url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
