"""What an instance answers, without HTTP: tickets, ranking, the cascade.

Histories are in user_endpoints.py, drain and reload in instance_lifecycle.py. Touch this when a
ranking endpoint does something else.
"""

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.history.history_store import HistoryStore
from slipstream.serving.http import messages as m
from slipstream.serving.http.endpoints import UNKEPT_HEADER
from slipstream.serving.http.explore_endpoints import ExploreEndpoints
from slipstream.serving.http.http_app import Handler, RequestContext, problem_of
from slipstream.serving.http.instance_lifecycle import InstanceLifecycle, OpenInstance
from slipstream.serving.http.observed_request import HIT_HEADER, REASON_HEADER
from slipstream.serving.http.request_history import append_recent, drop_unknown, read_history
from slipstream.serving.http.request_rules import read_rules
from slipstream.serving.http.shadow import ShadowScoring
from slipstream.serving.http.user_endpoints import UserEndpoints, window_of
from slipstream.serving.instance.recommend_query import RecommendQuery, RetrievalReport
from slipstream.serving.instance.request_stages import recorded_stages, stage
from slipstream.serving.router.ticket import TicketSigner
from slipstream.serving.supervisor_socket import Versions

if TYPE_CHECKING:  # a stand-in can be served without torch
    from slipstream.serving.instance.instance import Instance


STARTED = time.time()
log = logging.getLogger("slipstream.serving")


class InstanceService:
    """The endpoints of one instance."""

    def __init__(
        self,
        name: str,
        open_instance: OpenInstance,
        store: HistoryStore,
        tickets: TicketSigner,
        versions: Versions,
        drain_seconds: float = 10.0,
    ) -> None:
        self.name, self._tickets = name, tickets
        self.life = InstanceLifecycle(name, open_instance, self.stats, drain_seconds, versions)
        self.shadow = ShadowScoring(self.life)
        self.users = UserEndpoints(self.life, store)
        self.explore = ExploreEndpoints(self.life, self.users)
        self.counts: Counter[str] = Counter(ticket_expired=0, ticket_invalid=0)

    def handlers(self) -> dict[str, Handler]:
        """Return the handler of every endpoint by its name."""
        life, users = self.life, self.users
        return {
            "preinfer": self.preinfer,
            "rank": self.rank,
            "recommend": self.recommend,
            "events": self.events,
            "user": users.user,
            "delete": users.delete,
            "export": users.export,
            "status": life.status,
            "healthz": life.healthz,
            "readyz": life.readyz,
            "drain": life.drain,
            "undrain": life.undrain,
            "versions": life.versions,
            "prepare": life.prepare,
            "switch": life.switch,
            "kill": life.kill,
            **self.explore.handlers(),
        }

    def stats(self) -> dict[str, float]:
        """Return counters and gauges of the service and its instance."""
        counts = {name: float(count) for name, count in self.counts.items()}
        counts |= {name: float(count) for name, count in self.life.counts.items()}
        counts["start_time_seconds"] = STARTED
        return self.life.instance.stats() | counts | self.shadow.stats()

    async def close(self) -> None:
        """Finish running requests, then close the instance and the store."""
        await self.shadow.close()
        await self.life.close()
        await self.users.store.close()

    # ---- work ------------------------------------------------------------------------------------

    async def preinfer(
        self, request: m.PreinferRequest, context: RequestContext
    ) -> m.PreinferAnswer:
        """Announce a ranking; answer with a ticket whether or not it is admitted."""
        async with self.life.use(request.user) as instance:
            given = await self.users.read(instance, request, context)
            history = window_of(instance, given)
            rank_in = None if request.rank_in_ms is None else request.rank_in_ms / 1000
            admission = await instance.cascade.preinfer(request.user, given, rank_in)
            ticket = self._tickets.issue(
                request.user,
                self.name,
                instance.version,
                history.first,
                history.total,
                held=admission.admitted,
            )
            context.headers[REASON_HEADER] = admission.reason or "admitted"
            if not admission.admitted:
                context.headers[UNKEPT_HEADER] = "1"
            return m.PreinferAnswer(
                ticket,
                admission.admitted,
                admission.reason,
                self.name,
                instance.version,
                len(history),
                instance.cascade.from_behaviours,
            )

    async def events(self, request: m.EventsRequest, context: RequestContext) -> m.EventsAnswer:
        """Append behaviours, and announce the ranking that follows where the request says so.

        What fails of the announcement is no failure of the request: the behaviours are stored.
        """
        answer = await self.users.events(request, context)
        if request.preinfer is not None:
            more = request.preinfer
            announced = m.PreinferRequest(request.user, None, more.features, more.rank_in_ms)
            try:
                answer.preinfer = await self.preinfer(announced, context)
            except Exception as error:
                problem = problem_of(error)
                context.headers[REASON_HEADER] = problem.code
                log.warning("stored, but not announced: %s", problem.detail)
        return answer

    async def rank(self, request: m.RankRequest, context: RequestContext) -> m.RankAnswer:
        """Score candidates, behind the prefix that the ticket names where there is one.

        A ticket that has expired or was not issued here for this user is ignored.
        """
        ticket = self._tickets.find(request.ticket, request.user, self.counts)
        async with self.life.use(request.user) as instance:
            extra = len(request.recent.items) if request.recent is not None else 0
            history, _ = await self.users.history(instance, request, context, extra)
            split = history.total
            if ticket is not None and history.first < ticket.end < history.total:
                split = ticket.end
            older, recent = history.part(history.first, split), None
            if split < history.total or request.recent is not None:
                recent = history.part(split, history.total)
            if recent is not None and request.recent is not None:
                sent = read_history(request.recent, request.features, instance.timed)
                recent = append_recent(recent, sent)
            behaviours = len(older) + (0 if recent is None else len(recent))
            older = drop_unknown(instance, older)
            recent = None if recent is None else drop_unknown(instance, recent)
            known = len(older) + (0 if recent is None else len(recent))
            rows, items, unknown = _split_known(instance, request.candidates)
            answer = m.RankAnswer(
                {task: [] for task in instance.tasks},
                instance.version,
                self.name,
                "none",
                truncated=False,
                behaviours=behaviours,
                items=items,
                unknown=unknown,
                skipped=behaviours - known,
            )
            answer.titles, answer.shown = _about(instance, request, items)
            if items:
                with stage("rank"):
                    result = await instance.rank(
                        request.user,
                        older,
                        items,
                        recent=recent or None,
                        deadline=context.deadline,
                        allow_truncate=request.allow_truncate,
                        request_time=request.request_time,
                        context=request.context,
                        rows=rows,
                    )
                answer.scores = {task: scores.tolist() for task, scores in result.scores.items()}
                answer.hit, answer.truncated = result.hit, result.truncated
                context.headers[HIT_HEADER] = result.hit
                if not result.kept:
                    context.headers[UNKEPT_HEADER] = "1"
                if self.shadow.wants(request.user, instance.version):
                    self.shadow.offer(
                        request.user,
                        older if recent is None else older.then(recent),
                        items,
                        answer.scores,
                        request_time=request.request_time,
                        context=request.context,
                    )
            return answer

    async def recommend(
        self, request: m.RecommendRequest, context: RequestContext
    ) -> m.RecommendAnswer:
        """Retrieve, filter and rank; a user of whom nothing is known is answered too."""
        with recorded_stages(in_line=not request.relay) as stages:
            answer = await self._recommend(request, context)
        if request.timeline:
            found = [m.StageMessage(name, 1e3 * at, 1e3 * end) for name, at, end in stages.found]
            answer.timeline = m.Timeline(found, 1e3 * stages.now())
        return answer

    async def _recommend(
        self, request: m.RecommendRequest, context: RequestContext
    ) -> m.RecommendAnswer:
        async with self.life.use(request.user) as instance:
            _about(instance, request, [])  # refuses names that are no item feature
            keep_seen = request.keep_seen
            drop_seen = instance.rules.exclude_seen if keep_seen is None else not keep_seen
            cascade = instance.cascade
            with stage("history"):
                history = await self.users.read(
                    instance, request, context, whole=drop_seen, anybody=cascade.answers_anybody
                )
            query = RecommendQuery(
                request.count,
                context.deadline,
                request.retrieve,
                request.by,
                request.candidates,
                read_rules(request, history.items if drop_seen else None),
                request.allow_truncate,
                request.request_time,
                request.context,
                request.popular_days,
                request.new_items,
            )
            result = await cascade.recommend(request.user, history, query)
            context.headers[HIT_HEADER] = result.hit
            titles, shown = _about(instance, request, result.items)
            return m.RecommendAnswer(
                result.items,
                result.scores,
                instance.version,
                self.name,
                result.hit,
                result.truncated,
                len(window_of(instance, history)),
                result.unknown,
                result.skipped,
                titles,
                shown,
                result.boosts,
                result.cold,
                result.search,
                result.recall,
                _retrieval(result.retrieval),
            )


def _retrieval(report: RetrievalReport | None) -> m.RetrievalAnswer | None:
    if report is None:
        return None
    return m.RetrievalAnswer(report.version, report.hit, report.items, report.skipped)


def _split_known(
    instance: "Instance", items: list[m.Identity]
) -> tuple[np.ndarray, list[m.Identity], list[m.Identity]]:
    """Return the rows of known items, their ids in the catalogue's words, the others as sent."""
    rows = instance.items.find(items)
    known = rows >= 0
    if known.all():
        return rows, instance.items.originals(rows), []
    return rows[known], instance.items.originals(rows[known]), _places(items, ~known)


def _places(items: list[m.Identity], chosen: np.ndarray) -> list[m.Identity]:
    """Return the items whose place in `chosen` is true."""
    return [items[place] for place in np.flatnonzero(chosen).tolist()]


def _about(
    instance: "Instance", request: m.RankRequest | m.RecommendRequest, items: list[m.Identity]
) -> tuple[list[str | None] | None, dict[str, list[Any]] | None]:
    """Return titles and features of items, as far as the request asks for them."""
    return (
        instance.items.titles(items) if request.titles else None,
        instance.items.shown(request.show, items) if request.show else None,
    )
