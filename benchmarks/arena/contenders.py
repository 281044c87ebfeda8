"""The contenders: which script each runs, in which environment, with which settings.

Touch this to add a contender or to change its settings; the protocol names their sources.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.arena.data_sets import DataSet
from benchmarks.arena.environments import OWN
from slipstream.errors import SlipstreamError, did_you_mean

SCRIPTS = Path(__file__).parent / "peers"
Settings = dict[str, Any]


@dataclass(frozen=True)
class Contender:
    """A model of a system with its settings.

    `short` are the settings that differ on short histories, `quick` those of a first look.
    `only_timed`: it differs from another one by times alone. `only_on`: the data sets it runs on,
    where not all. `keeps_memory`: it has the allocator's setting of everybody.
    """

    name: str
    environment: str
    script: Path
    model: str
    settings: Settings
    short: Settings = field(default_factory=dict)
    quick: Settings = field(default_factory=dict)
    request_time: bool = False
    only_timed: bool = False
    needs_checkout: bool = False
    only_on: tuple[str, ...] = ()
    keeps_memory: bool = True

    @property
    def own(self) -> bool:
        """Whether it is one of Slipstream's."""
        return self.environment == OWN

    def runs_on(self, data: DataSet, *, timed: bool) -> bool:
        """Whether it takes part on a data set."""
        return (timed or not self.only_timed) and (not self.only_on or data.name in self.only_on)

    def settings_on(self, data: DataSet, *, quick: bool = False) -> Settings:
        """Return the settings on a data set."""
        short = self.short if data.short_histories else {}
        return {**self.settings, **short, **(self.quick if quick else {})}


_RECTOOLS = SCRIPTS / "rectools_models.py"
_RECTOOLS_HSTU: Settings = {
    "session_max_len": 200,
    "n_factors": 50,
    "n_blocks": 2,
    "n_heads": 1,
    "dropout_rate": 0.2,
    "loss": "sampled_softmax",
    "n_negatives": 128,
    "logits_t": 0.05,
    "lr": 1e-3,
    "batch_size": 128,
    "epochs": 100,
    "patience": 100,  # the tutorial trains all epochs
}
_RECTOOLS_SASREC: Settings = {
    **{name: _RECTOOLS_HSTU[name] for name in ("session_max_len", "n_blocks", "n_heads", "loss")},
    "n_factors": 64,
    "dropout_rate": 0.1,
    "n_negatives": 256,
    "lr": 1e-3,
    "batch_size": 128,
    "epochs": 200,
}
_RECTOOLS_QUICK: Settings = {
    "session_max_len": 32,
    "n_factors": 16,
    "n_blocks": 1,
    "n_heads": 1,
    "epochs": 2,
}


def _rectools(name: str, model: str, settings: Settings, **more: Any) -> Contender:
    short = {"session_max_len": 50, "dropout_rate": 0.5} if model == "sasrec" else {}
    return Contender(name, "rectools", _RECTOOLS, model, settings, short, _RECTOOLS_QUICK, **more)


def _slipstream(name: str, recipe: str, *overrides: str, **more: Any) -> Contender:
    """Return a contender of a shipped recipe; `overrides` are the keys that are changed."""
    small = ["model.dim=16", "model.heads=1", "model.blocks=1", "train.epochs=2"]
    settings = {"recipe": recipe, "overrides": list(overrides)}
    quick = {"overrides": [*overrides, *small, "model.max_len=32", "sampler.max_len=32"]}
    script = SCRIPTS / "slipstream_recipes.py"
    return Contender(name, OWN, script, "recipe", settings, {}, quick, **more)


CONTENDERS: tuple[Contender, ...] = (
    _rectools("rectools-hstu", "hstu", _RECTOOLS_HSTU, request_time=True),
    _rectools(
        "rectools-hstu-malloc",
        "hstu",
        _RECTOOLS_HSTU,
        request_time=True,
        only_on=("ml-1m",),
        keeps_memory=False,
    ),
    _rectools(
        "rectools-hstu-large",
        "hstu",
        {**_RECTOOLS_HSTU, "n_blocks": 8, "n_heads": 2},
        request_time=True,
    ),
    _rectools(
        "rectools-hstu-no-time",
        "hstu",
        {**_RECTOOLS_HSTU, "relative_time_attention": False},
        only_timed=True,
    ),
    _rectools("rectools-sasrec", "sasrec", _RECTOOLS_SASREC),
    Contender(
        "replay-sasrec",
        "replay",
        SCRIPTS / "replay_sasrec.py",
        "sasrec",
        {
            "max_seq_len": 200,
            "hidden_size": 64,
            "block_count": 2,
            "head_count": 1,
            "dropout_rate": 0.1,
            "loss_type": "CE",
            "learning_rate": 1e-3,
            "batch_size": 128,
            "epochs": 200,
        },
        {"max_seq_len": 50, "dropout_rate": 0.5},
        {"max_seq_len": 32, "hidden_size": 16, "block_count": 1, "epochs": 2},
    ),
    Contender(
        "cornac-sasrec",
        "cornac",
        SCRIPTS / "cornac_sasrec.py",
        "sasrec",
        {
            "max_len": 200,
            "embedding_dim": 64,
            "num_blocks": 2,
            "num_heads": 1,
            "dropout": 0.1,
            "learning_rate": 1e-3,
            "epochs": 200,
        },
        {"max_len": 50, "dropout": 0.5},
        {"max_len": 32, "embedding_dim": 16, "num_blocks": 1, "n_sample": 64, "epochs": 2},
    ),
    Contender(
        "recbole-sasrec",
        "recbole",
        SCRIPTS / "recbole_models.py",
        "sasrec",
        {
            "MAX_ITEM_LIST_LENGTH": 200,
            "hidden_size": 64,
            "n_layers": 2,
            "n_heads": 2,
            "hidden_dropout_prob": 0.2,
            "attn_dropout_prob": 0.2,
            "learning_rate": 1e-3,
            "epochs": 200,
        },
        {"MAX_ITEM_LIST_LENGTH": 50, "hidden_dropout_prob": 0.5, "attn_dropout_prob": 0.5},
        {"MAX_ITEM_LIST_LENGTH": 32, "hidden_size": 16, "n_layers": 1, "epochs": 2},
    ),
    Contender(
        "research-hstu",
        "research",
        SCRIPTS / "research_hstu.py",
        "hstu",
        {"epochs": 101},
        {},
        {"max_sequence_length": 32, "num_blocks": 1, "epochs": 2},
        request_time=True,
        needs_checkout=True,
    ),
    _slipstream("slipstream-hstu", "ml-1m-hstu", request_time=True),
    _slipstream(
        "slipstream-hstu-large",
        "ml-1m-hstu",
        "model.blocks=8",
        "model.heads=2",
        request_time=True,
    ),
    _slipstream("slipstream-hstu-no-time", "ml-1m-hstu", "model.time_bias=own", only_timed=True),
    _slipstream("slipstream-sasrec", "ml-1m-sasrec"),
    _slipstream("slipstream-default", "retrieval-default"),
)
QUICK = ("rectools-hstu", "rectools-sasrec", "slipstream-hstu", "slipstream-default")


def choose_contenders(
    names: Sequence[str] | None, *, checkout: Path | None = None, quick: bool = False
) -> list[Contender]:
    """Return the contenders of these names, or all that can take part, in the order of the list.

    A name may be the beginning of several, up to a hyphen: `rectools` means all of RecTools.
    """
    chosen = names or (QUICK if quick else [each.name for each in CONTENDERS])
    found: set[str] = set()
    for name in chosen:
        mine = [c for c in CONTENDERS if c.name == name] or [
            c for c in CONTENDERS if c.name.startswith(f"{name}-")
        ]
        if not mine:
            known = [each.name for each in CONTENDERS]
            raise SlipstreamError(
                f"there is no contender '{name}'{did_you_mean(name, known)}; the contenders are "
                f"{', '.join(known)}"
            )
        found |= {each.name for each in mine}
    ordered = [each for each in CONTENDERS if each.name in found]
    return [_with_checkout(c, checkout) for c in ordered if _takes_part(c, checkout, names)]


def _takes_part(contender: Contender, checkout: Path | None, names: Sequence[str] | None) -> bool:
    """Whether a contender can run: one that needs a checkout is left out unless it is named."""
    if not contender.needs_checkout or checkout is not None:
        return True
    if names and contender.name in names:
        raise SlipstreamError(
            f"{contender.name} runs the code of a clone; name its folder with --checkout"
        )
    return False


def _with_checkout(contender: Contender, checkout: Path | None) -> Contender:
    if not contender.needs_checkout:
        return contender
    settings = {**contender.settings, "checkout": str(Path(checkout or ".").resolve())}
    return replace(contender, settings=settings)
