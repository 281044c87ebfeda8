"""The named sizes, tiny to long, as TurboGR's table has them.

With these the dense parts count HSTU 0.17 / 1.33 / 10.52 / 83.97 M and FuXi 0.41 / 3.18 / 25.22 /
201.55 M parameters (tests hold them to 2 %). A long model is a large one with twice the sequence.
They carry relative positions only, no absolute ones, except SASRec, which knows no others.
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
    """The settings a size stands for, ready to fill what a recipe leaves open."""
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
