"""The messages of what people explore: items, neighbours, explanations, users, the fleet.

Touch this when one of these messages gets a field; the limits shared with requests are in
messages.py.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from slipstream.serving.http import messages as m

MAX_FOUND = 100
MAX_EXPLAINED = 500

Count = Annotated[int, Meta(ge=1, le=MAX_FOUND)]


class ModelAnswer(msgspec.Struct):
    """What is served: the model's tasks and sizes, and what its requests may name."""

    version: str
    name: str  # of the recipe that trained it
    kind: str  # hstu, fuxi, sasrec
    task: str  # retrieval or ranking
    tasks: list[str]  # names of scores
    items: int  # in the catalogue
    max_len: int  # behaviours that are read, at most
    timed: bool  # whether times are read
    repeats: bool  # whether items of a history may be recommended again
    titles: bool
    shows: list[str]  # item features that can be shown
    actions: list[str]  # read of every behaviour
    features: list[str]  # of users
    context: list[str]
    figures: dict[str, float] = {}  # quality when it was exported, as its run measured it


class SearchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Find items by title or id. Case and accents do not count."""

    query: Annotated[str, Meta(min_length=1, max_length=200)]
    count: Count = 20
    show: m.Shown = []


class ItemsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Look items up by id."""

    items: Annotated[list[m.Identity], Meta(min_length=1, max_length=m.MAX_COUNT)]
    show: m.Shown = []


class NeighboursRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Find the items whose vectors point most nearly the same way."""

    item: m.Identity
    count: Count = 10
    show: m.Shown = []


class ItemsAnswer(msgspec.Struct):
    """Items with their titles (null where one has none) and the features asked for."""

    items: list[m.Identity]
    titles: list[str | None]
    shown: dict[str, list[m.ShownValue]]
    unknown: list[m.Identity] = []  # asked for, but not in the catalogue
    scores: list[float] | None = None  # of neighbours: cosines


class ExplainRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Measure what each behaviour adds to the score of one item.

    The newest `behaviours` of the history are left out in turn.
    """

    user: m.User
    item: m.Identity
    history: m.HistoryMessage | None = None
    by: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    behaviours: Annotated[int, Meta(ge=1, le=MAX_EXPLAINED)] = 200
    features: m.Features = {}
    allow_truncate: bool = False
    request_time: m.RequestTime | None = None
    context: m.Context = {}


class ExplainAnswer(msgspec.Struct):
    """The score of the item, and of each explained behaviour what the score is without it.

    `effects` is the score minus `without`: what the behaviour adds. Both are null for the only
    behaviour of a history that must not be empty. `items` are the behaviours, oldest first.
    """

    item: m.Identity
    task: str
    score: float
    items: list[m.Identity]
    titles: list[str | None]
    without: list[float | None]
    effects: list[float | None]
    behaviours: int  # that the score depends on; the older ones were not left out in turn
    version: str
    instance: str
    milliseconds: float


class UsersAnswer(msgspec.Struct):
    """Users of the history store, in the order of their ids."""

    users: list[str]


class CacheTier(msgspec.Struct):
    """Prefixes kept in one tier, in bytes."""

    used: int
    budget: int
    entries: int
    pinned: int = 0


class FleetInstance(msgspec.Struct):
    """One instance, as its router saw it last.

    Response times are those of the last minute's requests that were answered. Counters begin when
    the instance's process begins.
    """

    name: str
    state: str  # ready, draining, ejected, down
    version: str
    pool: str
    started_at: float | None  # seconds since 1970; another process has another moment
    outstanding: int  # behaviours of requests sent to it and not answered
    backlog: int  # behaviours whose prefixes are still to be computed
    requests: int  # of the last minute
    p50_ms: float | None
    p99_ms: float | None
    device: CacheTier
    host: CacheTier | None
    hits: dict[str, int]  # rankings by where the prefix was found
    preinfer_admitted: int
    preinfer_refused: dict[str, int]  # by reason
    overloaded: dict[str, int]  # rankings refused, by reason


class FleetAnswer(msgspec.Struct):
    """The instances behind one router, and how the router's requests ended."""

    instances: list[FleetInstance]
    answers: dict[str, int]  # by status
    refusals: dict[str, int]  # by code
    draining: bool
    may_kill: bool
    seconds: float  # since the router started


class PageModel(msgspec.Struct):
    """A model that the page may ask: its name, and what its paths begin with."""

    name: str
    base: str = ""


class PageAnswer(msgspec.Struct):
    """What the web page can show here."""

    models: list[PageModel]
    runs: bool = False  # training runs
    simulation: bool = False


class KillRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Kill an instance; to an instance: itself."""

    instance: Annotated[str, Meta(min_length=1, max_length=128)] | None = None


class KillAnswer(msgspec.Struct):
    """Which instance was killed."""

    killed: str
