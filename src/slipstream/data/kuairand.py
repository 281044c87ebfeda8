"""Reads KuaiRand (Pure, 1K, 27K). Touch this when its files or signals change.

It reads every `log_standard*` file, CSV or Parquet, with feedback signals and basic features. Times
are milliseconds. Behaviours with equal times keep the order of the files by name, then of rows.
"""

from pathlib import Path

import polars as pl

from slipstream.data.log_files import scan_files
from slipstream.data.raw_log import Columns, RawLog
from slipstream.errors import SlipstreamError

SIGNALS = (
    "is_click",
    "is_like",
    "is_follow",
    "is_comment",
    "is_forward",
    "is_hate",
    "long_view",
    "is_profile_enter",
)
VIDEO_FEATURES = ("author_id", "video_type", "upload_type", "music_type", "tag")
USER_FEATURES = (
    "user_active_degree",
    "is_live_streamer",
    "is_video_author",
    "follow_user_num_range",
    "fans_user_num_range",
    "friend_user_num_range",
    "register_days_range",
    *(f"onehot_feat{index}" for index in range(18)),
)
SUFFIXES = (".csv", ".csv.gz", ".parquet")


def read_kuairand(root: Path) -> RawLog:
    """Read the standard log under `root`; the random-exposure log is not read."""
    paths = _matching(root, "log_standard")
    if not paths:
        raise SlipstreamError(
            f"{root} holds no KuaiRand log (looked for log_standard*.csv and log_standard*.parquet)"
        )
    names = [set(scan_files([path]).collect_schema().names()) for path in paths]
    signals = tuple(name for name in SIGNALS if all(name in known for known in names))
    columns = Columns("user_id", "video_id", "time_ms", actions=signals)
    wanted = [columns.user, columns.item, columns.time, *signals]
    missing = [name for name in wanted if not all(name in known for known in names)]
    if missing:
        raise SlipstreamError(f"the KuaiRand log under {root} lacks the column '{missing[0]}'")
    log = pl.concat([scan_files([path]).select(wanted) for path in paths])
    return RawLog(
        log,
        columns,
        time_unit="ms",
        items=_features(root, "video_features_basic", "video_id", VIDEO_FEATURES),
        users=_features(root, "user_features", "user_id", USER_FEATURES),
        source={"logs": [path.name for path in paths]},
    )


def _matching(root: Path, start: str) -> list[Path]:
    found = [path for path in root.rglob(f"{start}*") if path.name.endswith(SUFFIXES)]
    return sorted(found, key=lambda path: path.name)


def _features(root: Path, start: str, key: str, wanted: tuple[str, ...]) -> pl.LazyFrame | None:
    paths = _matching(root, start)
    if not paths:
        return None
    frame = scan_files(paths)
    known = frame.collect_schema().names()
    if key not in known:
        return None
    chosen = [pl.col(name).cast(pl.String) for name in wanted if name in known]
    return frame.select(pl.col(key).alias("id"), *chosen)
