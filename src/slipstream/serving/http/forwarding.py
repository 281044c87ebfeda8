"""Which requests a router forwards, and the few fields of a request that it reads.

Touch this when an endpoint is forwarded to instances, or when another field decides where to.
"""

import msgspec

from slipstream.serving.http import messages as m
from slipstream.serving.http.endpoints import ENDPOINTS, Endpoint
from slipstream.serving.http.http_app import Handler, HttpProblem, RequestContext
from slipstream.serving.http.limits import request_cost
from slipstream.serving.router.stored_lengths import StoredLengths

FORWARDED = {
    endpoint.path: endpoint
    for endpoint in ENDPOINTS
    if endpoint.name in ("preinfer", "rank", "recommend", "events", "explain")
}
# Any instance answers these; equal questions go to the same one.
OF_ANY_INSTANCE: dict[tuple[str, str], Endpoint] = {
    (endpoint.method, endpoint.path): endpoint
    for endpoint in ENDPOINTS
    if endpoint.name in ("users", "model", "items", "search", "neighbours")
}
RANKING = ("/v1/preinfer", "/v1/rank", "/v1/recommend")  # work that grows with the history
# (method, what comes before the user in the path) of the endpoints about one user
OF_A_USER = {
    (endpoint.method, endpoint.path.removesuffix("{user}")): endpoint.name
    for endpoint in ENDPOINTS
    if endpoint.path.endswith("{user}")
}
ASSUMED_BEHAVIOURS = 512  # of a stored user whose length no answer has told yet


class HistoryLength(msgspec.Struct):
    """The number of items in a history; nothing else of it is decoded."""

    items: msgspec.Raw = msgspec.Raw(b"")

    def behaviours(self) -> int:
        """The number of items."""
        return bytes(self.items).count(b",") + 1


class RoutingFields(msgspec.Struct):
    """The fields of a request that decide where it goes; the instance checks all others."""

    user: m.User
    ticket: m.TicketText | None = None
    history: HistoryLength | None = None
    candidates: msgspec.Raw = msgspec.Raw(b"")
    retrieve: int | None = None
    preinfer: msgspec.Raw = msgspec.Raw(b"")

    def ranks(self, path: str) -> bool:
        """Whether the request is work that grows with the history: a ranking, or its prefix."""
        return path in RANKING or bytes(self.preinfer) not in (b"", b"null")

    def behaviours(self, user: str, stored: StoredLengths) -> int:
        """The behaviours of the request: those it carries, or those last known to be stored."""
        if self.history is not None:
            return self.history.behaviours()
        return stored.get(user, ASSUMED_BEHAVIOURS)

    def cost(self) -> float:
        """What the request costs against the rate: by the items it lets score."""
        if self.candidates and bytes(self.candidates) != b"null":
            return request_cost(bytes(self.candidates).count(b",") + 1)
        return request_cost(min(self.retrieve or 0, m.MAX_CANDIDATES))


decode_fields = msgspec.json.Decoder(RoutingFields).decode


def forwarded_name(method: str, path: str) -> str | None:
    """The endpoint's name if its requests are forwarded."""
    if (method, path) in OF_ANY_INSTANCE:
        return OF_ANY_INSTANCE[method, path].name
    if method == "POST":
        return FORWARDED[path].name if path in FORWARDED else None
    found = user_of_path(method, path)
    return None if found is None else found[0]


def user_of_path(method: str, path: str) -> tuple[str, str] | None:
    """The endpoint's name and the user in a path about one user."""
    for (verb, start), name in OF_A_USER.items():
        if verb == method and path.startswith(start) and path != start:
            return name, path.removeprefix(start)
    return None


def forwarded_handlers() -> dict[str, Handler]:
    """Handlers for the forwarded paths, so that Starlette answers a wrong method with 405.

    Requests with the right method never come here.
    """

    async def refuse(_message: object, _context: RequestContext) -> None:
        raise HttpProblem(404, "not_found", "Not Found")

    names = [each.name for each in (*FORWARDED.values(), *OF_ANY_INSTANCE.values())]
    return dict.fromkeys((*names, *OF_A_USER.values()), refuse)
