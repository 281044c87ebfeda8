"""The named sizes, tiny to long, as in TurboGR's table.

With these the dense parts have 0.17 / 1.33 / 10.52 / 83.97 M (HSTU) and 0.41 / 3.18 / 25.22 /
201.55 M (FuXi) parameters; tests check them to 2 %. A long model is a large one with twice the
sequence. HSTU and FuXi have relative positions only, SASRec absolute ones. Touch this when a size
is added.
"""

from typing import Any, Literal, get_args

Size = Literal["tiny", "small", "medium", "large", "long"]
SIZES: tuple[Size, ...] = get_args(Size)

_TIME_BUCKETS = {"hstu": 32, "fuxi": 128, "sasrec": 0}
_WIDTH_AND_BLOCKS: dict[str, tuple[int, int]] = {
    "tiny": (128, 2),
    "small": (256, 4),
    "medium": (512, 8),
    "large": (1024, 16),
    "long": (1024, 16),
}


def named_size(kind: str, size: str) -> dict[str, Any]:
    """The settings of a named size, for what a recipe leaves out."""
    dim, blocks = _WIDTH_AND_BLOCKS[size]
    return {
        "dim": dim,
        "blocks": blocks,
        "heads": 8,
        "dqk": dim // 8,
        "dv": dim // 8,
        "max_len": 4096 if size == "long" else 2048,
        "time_buckets": _TIME_BUCKETS[kind],
        "position_embedding": kind == "sasrec",
    }
