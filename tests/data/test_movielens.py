"""Every MovieLens release in miniature, in the shapes it comes in."""

import gzip
import zipfile

import numpy as np
import pytest

from slipstream.data.catalogue import ENTRIES
from slipstream.data.ingest import Filters
from slipstream.data.preparation import Choices, prepare
from slipstream.data.store import SequenceStore
from tests.support.data_fixtures import EXPECTED, RATINGS, movielens_1m, sequences


def check_movielens(store: SequenceStore) -> None:
    assert sequences(store) == EXPECTED
    assert store.actions["rating"].tolist() == [1, 5, 3, 4, 2]


def test_the_1m_release_has_ratings_titles_and_features(tmp_path):
    source = movielens_1m(tmp_path / "ml-1m")
    store = prepare("ml-1m", tmp_path / "out", Choices(source=source, min_item_count=1))
    check_movielens(store)
    assert store.items.title(store.items.row(10)) == "Héat: A Film (1995)"
    assert store.items.title(store.items.row(30)) is None
    genre, genres, year = (store.item_features[name] for name in ("genre", "genres", "year"))
    rows = [store.items.row(item) for item in (10, 20, 30)]
    assert [genre.labels[int(code)].as_py() for code in genre.codes[rows]] == [
        "Action",
        "Drama",
        "",
    ]
    assert genres.cardinality == 3 and genres.codes[rows].tolist() == [1, 2, 0]
    assert year.codes[rows].tolist() == [1, 0, 0] and year.codes.dtype == np.int64
    assert store.user_features["gender"].codes.tolist() == [1, 2]
    assert set(store.user_features) == {"gender", "age", "occupation"}
    assert (
        ENTRIES["ml-1m"].filters == Filters(min_item_count=5)
        and store.meta["filters"]["min_item_count"] == 1
    )


def test_the_100k_release_is_the_same_in_both_shapes(tmp_path):
    official, registry = tmp_path / "official", tmp_path / "registry"
    official.mkdir()
    registry.mkdir()
    (official / "u.data").write_text("".join("\t".join(map(str, row)) + "\n" for row in RATINGS))
    (official / "u.item").write_bytes(
        "10|Héat (1995)|01-Jan-1995||url|0|1|0|0|0|1\n".encode("latin-1")
    )
    (official / "u.user").write_text("1|24|M|technician|85711\n2|53|F|other|94043\n")
    header = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    (registry / "ml-100k.inter").write_text(
        header + "".join("\t".join(map(str, row)) + "\n" for row in RATINGS)
    )
    (registry / "ml-100k.item").write_text(
        "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
        "10\tHéat\t1995\tAction Comedy\n"
    )
    (registry / "ml-100k.user").write_text(
        "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
        "1\t24\tM\ttechnician\t1\n2\t53\tF\tother\t2\n"
    )
    stores = [
        prepare("ml-100k", tmp_path / f"out-{root.name}", Choices(source=root))
        for root in (official, registry)
    ]
    for store in stores:
        check_movielens(store)
        assert store.items.title(0) == "Héat (1995)"
        assert store.item_features["genre"].labels[1].as_py() == "Action"
        assert store.user_features["gender"].codes.tolist() == [2, 1]
    assert (
        stores[0].item_features["genres"].labels[1].as_py()
        == stores[1].item_features["genres"].labels[1].as_py()
        == "Action|Comedy"
    )


@pytest.mark.parametrize("packed", ["folder", "gzip", "zip"])
def test_a_csv_release_is_read_from_folder_and_archive(packed, tmp_path):
    ratings = "userId,movieId,rating,timestamp\n" + "".join(
        ",".join(map(str, row)) + "\n" for row in RATINGS
    )
    movies = (
        'movieId,title,genres\n10,"Heat, the Film (1995)",Action|Crime\n20,Other,(no genres '
        "listed)\n"
    )
    source = tmp_path / "ml-latest-small"
    if packed == "zip":
        source = tmp_path / "ml-latest-small.zip"
        with zipfile.ZipFile(source, "w") as archive:
            archive.writestr("ml-latest-small/ratings.csv", ratings)
            archive.writestr("ml-latest-small/movies.csv", movies)
    else:
        source.mkdir()
        for name, text in (("ratings.csv", ratings), ("movies.csv", movies)):
            if packed == "gzip":
                (source / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
            else:
                (source / name).write_text(text)
    store = prepare("ml-latest-small", tmp_path / "out", Choices(source=source))
    check_movielens(store)
    assert store.items.title(0) == "Heat, the Film (1995)" and store.item_features[
        "genre"
    ].codes.tolist() == [1, 0, 0]
    if packed == "zip":
        assert store.meta["source"]["md5_known"] is False and len(store.meta["source"]["md5"]) == 32
