"""The HTTP messages: what requests and answers contain, and their limits.

They are JSON, decoded and checked by msgspec before anything else. A request carries its history by
value, or leaves it out and names a user of the history store. Touch this when a message gets a
field; clients rely on the names here.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_BEHAVIOURS = 65_536
MAX_EVENTS = 4_096
MAX_CANDIDATES = 10_000
MAX_COUNT = 1_000

MAX_ID_CHARACTERS = 256

Identity = (
    Annotated[int, Meta(ge=INT64_MIN, le=INT64_MAX, description="An item's original id.")]
    | Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARACTERS)]
)
Timestamp = Annotated[
    int, Meta(ge=0, lt=2**62, description="Seconds since 1970, never going back within a history.")
]
ActionName = Annotated[str, Meta(min_length=1, max_length=64)]
ActionValue = Annotated[float, Meta(ge=-1e9, le=1e9)]
Label = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARACTERS)]
FeatureValue = float | int | Label | Annotated[list[int | Label], Meta(max_length=1_000)]
User = Annotated[
    str,
    Meta(min_length=1, max_length=MAX_ID_CHARACTERS, description="The user's id, any text."),
]
Candidates = Annotated[list[Identity], Meta(min_length=1, max_length=MAX_CANDIDATES)]
Features = Annotated[
    dict[ActionName, FeatureValue | None],
    Meta(
        max_length=64,
        description="User features the model was trained with: a label or its code, a list of "
        "them where a user has several, or a number; an absent one counts as not known.",
    ),
]
Context = Annotated[
    dict[ActionName, Label | None],
    Meta(
        max_length=32,
        description="Labels of the request, such as its surface and device: the context of its "
        "candidates, where a ranking model reads some; an absent one counts as not known.",
    ),
]
RequestTime = Annotated[
    int,
    Meta(
        ge=0,
        lt=2**62,
        description="The moment of the request in seconds since 1970; that of the last behaviour "
        "unless given.",
    ),
]
RankIn = Annotated[float, Meta(ge=0, le=600_000, description="When the ranking request will come.")]
Shown = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=64)]],
    Meta(max_length=32, description="Item features to return in `shown`."),
]
ShownValue = str | float | list[str] | None  # a label, a number, labels; null where not known
TicketText = Annotated[
    str, Meta(min_length=1, max_length=512, description="As /v1/preinfer returned it.")
]


class HistoryMessage(msgspec.Struct, forbid_unknown_fields=True):
    """Behaviours, oldest first; `actions` holds one value per behaviour under each name.

    `context` holds one label per behaviour under each name, null where it is not known.
    Only for a model of a log without times may `timestamps` be left away.
    """

    items: Annotated[list[Identity], Meta(max_length=MAX_BEHAVIOURS)]
    timestamps: Annotated[list[Timestamp], Meta(max_length=MAX_BEHAVIOURS)] | None = None
    actions: Annotated[
        dict[ActionName, Annotated[list[ActionValue], Meta(max_length=MAX_BEHAVIOURS)]],
        Meta(max_length=32),
    ] = {}
    context: Annotated[
        dict[ActionName, Annotated[list[Label | None], Meta(max_length=MAX_BEHAVIOURS)]],
        Meta(max_length=32),
    ] = {}


class PreinferRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Compute this user's history now, because a ranking request will follow.

    An earlier ticket leads to the instance that has the last prefix.
    """

    user: User
    history: HistoryMessage | None = None
    features: Features = {}
    rank_in_ms: RankIn | None = None
    ticket: TicketText | None = None


class PreinferAnswer(msgspec.Struct):
    """Whether the work was admitted, and the reason; the ticket is valid in both cases.

    A shorter history than `from_behaviours` gains too little: who knows its length need not ask.
    """

    ticket: str
    admitted: bool
    reason: str
    instance: str
    version: str
    behaviours: int
    from_behaviours: int = 0


class RankRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Score candidates for a user.

    `recent` are behaviours newer than the history; `allow_truncate` permits a shorter history:
    where one is sent that is longer than the model reads, or where time is short.
    """

    user: User
    candidates: Candidates
    history: HistoryMessage | None = None
    recent: HistoryMessage | None = None
    features: Features = {}
    ticket: TicketText | None = None
    allow_truncate: bool = False
    request_time: RequestTime | None = None
    titles: bool = False
    show: Shown = []
    context: Context = {}


class RankAnswer(msgspec.Struct):
    """One score per known candidate for every task; `items` says of which."""

    scores: dict[str, list[float]]  # by task, one per item
    version: str
    instance: str
    hit: str  # where the prefix was found
    truncated: bool
    behaviours: int
    items: list[Identity] = []  # the candidates scored, as they were sent
    unknown: list[Identity] = []  # candidates that the catalogue lacks
    skipped: int = 0  # behaviours left out, because the catalogue lacks their items
    titles: list[str | None] | None = None
    shown: dict[str, list[ShownValue]] | None = None


class NumberCondition(msgspec.Struct, forbid_unknown_fields=True):
    """Numbers from `from` to `to`, both included; an absent one is no bound."""

    least: Annotated[float, Meta(ge=-1e18, le=1e18)] | None = msgspec.field(
        default=None, name="from"
    )
    most: Annotated[float, Meta(ge=-1e18, le=1e18)] | None = msgspec.field(default=None, name="to")


FeatureName = Annotated[str, Meta(min_length=1, max_length=64)]
Conditions = Annotated[
    dict[
        FeatureName,
        Annotated[list[Label], Meta(min_length=1, max_length=1_000)] | NumberCondition,
    ],
    Meta(max_length=16, description="Item features: one of these labels, or a range of numbers."),
]


class BoostMessage(msgspec.Struct, forbid_unknown_fields=True):
    """Adds to the score by which items are ordered: of these items, where these conditions hold."""

    add: Annotated[float, Meta(ge=-1e6, le=1e6)]
    items: Annotated[list[Identity], Meta(max_length=MAX_COUNT)] = []
    where: Conditions = {}


class RecommendRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The whole cascade: retrieve (or take `candidates`), apply the rules, rank.

    `allow`, `exclude`, `where` and `exclude_where` say which items may come, `boosts` change their
    order, `most_per` bounds how many share a label. A user of whom nothing is known is answered by
    popularity or by `features`; the answer's `cold` says so.
    """

    user: User
    count: Annotated[int, Meta(ge=1, le=MAX_COUNT)] = 10
    history: HistoryMessage | None = None
    candidates: Candidates | None = None
    exclude: Annotated[list[Identity], Meta(max_length=MAX_CANDIDATES)] = []
    allow: Annotated[list[Identity], Meta(max_length=MAX_CANDIDATES)] | None = None
    where: Conditions = {}
    exclude_where: Conditions = {}
    boosts: Annotated[list[BoostMessage], Meta(max_length=32)] = []
    most_per: Annotated[
        dict[FeatureName, Annotated[int, Meta(ge=1, le=MAX_COUNT)]],
        Meta(max_length=8, description="By item feature: how many items may share a label."),
    ] = {}
    popular_days: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=36_500,
                description="For a user of whom nothing is known: what was popular in the last "
                "days of the log; all of it unless given.",
            ),
        ]
        | None
    ) = None
    new_items: Annotated[
        dict[Label, Annotated[dict[FeatureName, FeatureValue | None], Meta(max_length=64)]],
        Meta(
            max_length=MAX_COUNT,
            description="Features of candidates that the catalogue lacks, by id, so that a ranking "
            "model with item features ranks them too.",
        ),
    ] = {}
    retrieve: Annotated[
        int, Meta(ge=1, le=MAX_CANDIDATES, description="How many items to retrieve before ranking.")
    ] = 200
    by: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=64,
                description="The task to order by; the first one unless given.",
            ),
        ]
        | None
    ) = None
    features: Features = {}
    keep_seen: (
        Annotated[
            bool,
            Meta(
                description="Whether items of the user's whole history may be recommended; the "
                "model's own rule (`repeat` of its recipe) unless given."
            ),
        ]
        | None
    ) = None
    allow_truncate: bool = False
    request_time: RequestTime | None = None
    titles: bool = False
    show: Shown = []
    context: Context = {}
    timeline: bool = False  # tell what the instance did when
    relay: bool = True  # false: find and leave no prefix, to see what the relay saves


class StageMessage(msgspec.Struct):
    """One stage of a request, in milliseconds since the instance began it."""

    name: str  # history, prefix, retrieve, rank
    start_ms: float
    end_ms: float


class Timeline(msgspec.Struct):
    """What an instance did when for a request; stages may overlap."""

    stages: list[StageMessage]
    total_ms: float


class RetrievalAnswer(msgspec.Struct):
    """How the retrieval bundle took part, where one bundle retrieves and another ranks."""

    version: str
    hit: str
    items: int  # how many it retrieved
    skipped: int  # behaviours left out, because it lacks their items


class RecommendAnswer(msgspec.Struct):
    """The best items with their scores for every task."""

    items: list[Identity]  # best first
    scores: dict[str, list[float]]  # by task, one per item
    version: str
    instance: str
    hit: str
    truncated: bool
    behaviours: int
    unknown: list[Identity] = []  # candidates that the catalogue lacks
    skipped: int = 0  # behaviours left out, because the catalogue lacks their items
    titles: list[str | None] | None = None
    shown: dict[str, list[ShownValue]] | None = None
    boosts: list[float] | None = None  # what was added to order each item, where boosts were sent
    cold: str | None = None  # of a user without known behaviours: popularity or features
    search: str = "exact"  # or the approximate index that found the items
    recall: float | None = None  # of that index, as measured when it was opened
    retrieval: RetrievalAnswer | None = None
    timeline: Timeline | None = None


class Announcement(msgspec.Struct, forbid_unknown_fields=True):
    """A ranking request will follow the behaviours that are sent: compute the history now."""

    features: Features = {}
    rank_in_ms: RankIn | None = None


class EventsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Behaviours to append to a user's stored history.

    Without `timestamps` they happened now. `after`, when given, is the number of behaviours the
    sender believes are stored: a repeated request is refused, so nothing is stored twice. With
    `preinfer` the ranking that follows is announced, as by /v1/preinfer, without a second request.
    """

    user: User
    items: Annotated[list[Identity], Meta(min_length=1, max_length=MAX_EVENTS)]
    timestamps: Annotated[list[Timestamp], Meta(min_length=1, max_length=MAX_EVENTS)] | None = None
    actions: Annotated[
        dict[ActionName, Annotated[list[ActionValue], Meta(max_length=MAX_EVENTS)]],
        Meta(max_length=32),
    ] = {}
    after: Annotated[int, Meta(ge=0, le=INT64_MAX)] | None = None
    context: Annotated[
        dict[ActionName, Annotated[list[Label | None], Meta(max_length=MAX_EVENTS)]],
        Meta(max_length=32),
    ] = {}
    preinfer: Announcement | None = None


class EventsAnswer(msgspec.Struct):
    """How many behaviours were ever stored for the user, these included.

    `preinfer` answers the announcement; null without one, and where it failed: the behaviours are
    stored all the same.
    """

    behaviours: int
    preinfer: PreinferAnswer | None = None


class UserAnswer(msgspec.Struct):
    """What is stored of a user: how many behaviours ever, and the most recent, oldest first."""

    user: str
    behaviours: int
    recent: HistoryMessage


class DeleteAnswer(msgspec.Struct):
    """How many stored behaviours of a user were deleted; 0 where nothing was stored."""

    user: str
    deleted: int


class StatusAnswer(msgspec.Struct):
    """The state of an instance, for routers; `backlog` are the behaviours still to compute."""

    instance: str
    version: str
    ready: bool
    draining: bool
    backlog: int
    stats: dict[str, float]


class DrainRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Finish present requests and take no new ones; to a router: which instance, or itself."""

    instance: Annotated[str, Meta(min_length=1, max_length=128)] | None = None


class DrainAnswer(msgspec.Struct):
    """What is draining now."""

    draining: str


class UndrainAnswer(msgspec.Struct):
    """What takes requests again."""

    serving: str


class ReloadRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Open the bundle's directory again. `version`, when given, must be what is found there.

    Below 1, `share` makes it a candidate for that share of the users; `shadow` of the other users'
    rankings are scored by it too, and only compared.
    """

    version: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    share: Annotated[float, Meta(ge=0.0, le=1.0)] = 1.0
    shadow: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0


class ReloadAnswer(msgspec.Struct):
    """The model version of every instance, before and after."""

    before: dict[str, str]
    after: dict[str, str]


class HealthAnswer(msgspec.Struct):
    """`ok`, or the cause in a word."""

    status: str


class Problem(msgspec.Struct):
    """Every refusal: a stable code for programs, a sentence for people."""

    error: str
    detail: str
