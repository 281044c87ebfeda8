"""Reads MovieLens releases. Touch this to read another one.

Ratings are `::`-separated (1M), tab-separated (100K) or CSV with a header (20M, latest-small).
Behaviours keep the order of the ratings file; the rating is the one action. Items have a title, the
first genre, all genres and a year; users have gender, age and occupation if the release has them.
"""

from pathlib import Path

import polars as pl

from slipstream.data.log_files import scan_files
from slipstream.data.raw_log import Columns, RawLog
from slipstream.errors import SlipstreamError

COLUMNS = Columns("userId", "movieId", "timestamp", actions=("rating",))
# fmt: off
GENRES_100K = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary",
    "Drama", "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi",
    "Thriller", "War", "Western",
)
# fmt: on


def find_file(root: Path, *names: str) -> Path | None:
    """Return the first of `names` found in `root`, or in the folders below it."""
    for name in names:
        if (root / name).is_file():
            return root / name
    for name in names:
        found = sorted(root.rglob(name))
        if found:
            return found[0]
    return None


def read_movielens(root: Path) -> RawLog:
    """Read the log of the MovieLens release in `root`."""
    readers = {
        "ratings.dat": _read_1m,
        "u.data": _read_100k,
        "ml-100k.inter": _read_atomic_100k,
        "ratings.csv": _read_csv,
        "ratings.csv.gz": _read_csv,
    }
    for name, reader in readers.items():
        path = find_file(root, name)
        if path is not None:
            return reader(path)
    raise SlipstreamError(f"{root} holds no MovieLens ratings (looked for {', '.join(readers)})")


def _positional(path: Path, separator: str, places: tuple[int, int, int, int]) -> pl.LazyFrame:
    """Scan a file without header; `places` are the columns of user, item, rating, time."""
    frame = scan_files([path], has_header=False, separator=separator, quote_char=None)
    names = frame.collect_schema().names()
    if len(names) <= max(places):
        raise SlipstreamError(
            f"{path.name} does not have the columns user, item, rating, time of a MovieLens release"
        )
    user, item, rating, time = (names[place] for place in places)
    return frame.select(userId=user, movieId=item, rating=rating, timestamp=time)


def _read_1m(path: Path) -> RawLog:
    movies = [line.split("::") for line in _lines(path.with_name("movies.dat"))]
    people = [line.split("::") for line in _lines(path.with_name("users.dat"))]
    users = _people([(p[0], p[1], p[2], p[3]) for p in people])
    # Fields are two colons apart, so a single colon leaves every second column empty.
    return RawLog(
        _positional(path, ":", (0, 2, 4, 6)),
        COLUMNS,
        items=_movies([(m[0], m[1], m[2]) for m in movies if len(m) == 3]),
        users=users,
    )


def _read_100k(path: Path) -> RawLog:
    movies = []
    for line in _lines(path.with_name("u.item")):
        fields = line.split("|")
        flags = zip(GENRES_100K, fields[5:], strict=False)
        movies.append(
            (fields[0], fields[1], "|".join(genre for genre, flag in flags if flag == "1"))
        )
    people = [line.split("|") for line in _lines(path.with_name("u.user"))]
    users = _people([(p[0], p[2], p[1], p[3]) for p in people])
    return RawLog(
        _positional(path, "\t", (0, 1, 2, 3)), COLUMNS, items=_movies(movies), users=users
    )


def _read_atomic_100k(path: Path) -> RawLog:
    """Read the release with typed headers (`user_id:token`) that the package registry has."""
    frame = scan_files([path], separator="\t", quote_char=None)
    frame = frame.select(
        userId="user_id:token",
        movieId="item_id:token",
        rating="rating:float",
        timestamp="timestamp:float",
    )
    movies = [tuple(line.split("\t")) for line in _lines(path.with_name("ml-100k.item"))[1:]]
    rows = [
        (m[0], f"{m[1]} ({m[2]})" if m[2] else m[1], m[3].replace(" ", "|"))
        for m in movies
        if len(m) == 4
    ]
    people = [line.split("\t") for line in _lines(path.with_name("ml-100k.user"))[1:]]
    users = _people([(p[0], p[2], p[1], p[3]) for p in people])
    return RawLog(frame, COLUMNS, items=_movies(rows), users=users)


def _read_csv(path: Path) -> RawLog:
    movies = find_file(path.parent, path.name.replace("ratings", "movies"))
    if movies is None:
        return RawLog(scan_files([path]), COLUMNS)
    table = scan_files([movies]).select(id="movieId", title="title", genres="genres").collect()
    return RawLog(scan_files([path]), COLUMNS, items=_movies(table.rows()))


def _lines(path: Path) -> list[str]:
    """Return the lines of a small file, none if it is missing; old releases are Latin-1."""
    if not path.is_file():
        return []
    data = path.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    return [line for line in text.replace("\r\n", "\n").split("\n") if line]


def _people(rows: list[tuple[str, str, str, str]]) -> pl.LazyFrame | None:
    if not rows:
        return None
    return pl.DataFrame(rows, schema=["id", "gender", "age", "occupation"], orient="row").lazy()


def _movies(rows: list[tuple]) -> pl.LazyFrame | None:
    """Return `id`, `title`, and the features `genre` (the first), `genres` (all) and `year`."""
    if not rows:
        return None
    frame = pl.DataFrame(
        rows, schema={"id": pl.String, "title": pl.String, "genres": pl.String}, orient="row"
    )
    genres = (
        pl.when(pl.col("genres").is_in(["", "(no genres listed)"]))
        .then(None)
        .otherwise(pl.col("genres"))
    )
    return frame.lazy().select(
        "id",
        "title",
        genre=genres.str.split("|").list.first(),
        genres=genres,
        year=pl.col("title").str.extract(r"\((\d{4})\)\s*$"),
    )
