"""Every release the catalogue reads, in miniature; the synthetic log; `inspect`."""

import gzip
import json
import zipfile
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from slipstream.data.catalogue import ENTRIES
from slipstream.data.ingest import Filters
from slipstream.data.preparation import Choices, prepare
from slipstream.data.statistics import statistics, tie_share
from slipstream.data.store import SequenceStore
from slipstream.data.synthetic import Synthetic, with_lengths
from tests.support.data_fixtures import run_cli, sequences

RATINGS = [(1, 10, 5, 100), (1, 20, 3, 100), (2, 10, 4, 50), (1, 30, 1, 90), (2, 30, 2, 60)]
EXPECTED = {1: [(30, 90), (10, 100), (20, 100)], 2: [(10, 50), (30, 60)]}
KEEP_ALL = Choices(min_item_count=1)


def movielens_1m(root: Path) -> Path:
    root.mkdir()
    (root / "ratings.dat").write_text("".join("::".join(map(str, row)) + "\n" for row in RATINGS))
    movies = (
        "10::Héat: A Film (1995)::Action|Crime\n20::Nothing::Drama\n40::Never Rated (1990)::Drama\n"
    )
    (root / "movies.dat").write_bytes(movies.encode("latin-1"))
    (root / "users.dat").write_text("1::F::18::3::12345\n2::M::25::7::54321\n")
    return root


def check_movielens(store: SequenceStore) -> None:
    assert sequences(store) == EXPECTED
    assert store.actions["rating"].tolist() == [1, 5, 3, 4, 2]


def test_movielens_1m(tmp_path):
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


def test_movielens_100k_in_both_shapes(tmp_path):
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
        "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n10\tHéat\t1995\tAction Comedy\n"
    )
    (registry / "ml-100k.user").write_text(
        "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n1\t24\tM\ttechnician\t1\n2\t53\tF\tother\t2\n"
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
def test_movielens_csv(packed, tmp_path):
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


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_kuairand(kind, tmp_path):
    root = tmp_path / "KuaiRand-Pure" / "data"
    root.mkdir(parents=True)
    first = pl.DataFrame(
        {
            "user_id": [5, 5],
            "video_id": [1, 2],
            "time_ms": [2500, 1200],
            "is_click": [1, 0],
            "long_view": [0, 1],
            "tab": [1, 1],
        }
    )
    second = first.with_columns(time_ms=pl.Series([2900, 9000]), video_id=pl.Series([3, 3]))
    for name, frame in (
        ("log_standard_4_08_pure", first),
        ("log_standard_4_22_pure", second),
        ("log_random_pure", first),
    ):
        getattr(frame, f"write_{kind}")(root / f"{name}.{kind}")
    pl.DataFrame({"video_id": [1, 3], "author_id": [77, 88], "tag": ["4,5", None]}).write_csv(
        root / "video_features_basic_pure.csv"
    )
    pl.DataFrame({"user_id": [5], "user_active_degree": ["full_active"]}).write_csv(
        root / "user_features_pure.csv"
    )
    store = prepare("kuairand-pure", tmp_path / "out", Choices(source=tmp_path / "KuaiRand-Pure"))
    assert sequences(store) == {5: [(2, 1), (1, 2), (3, 2), (3, 9)]}
    assert {name: values.tolist() for name, values in store.actions.items()} == {
        "is_click": [0, 1, 1, 0],
        "long_view": [1, 0, 0, 1],
    }
    assert store.item_features["author_id"].codes.tolist() == [1, 0, 2] and store.item_features[
        "tag"
    ].codes.tolist() == [
        1,
        0,
        0,
    ]
    assert store.user_features["user_active_degree"].cardinality == 2


@pytest.mark.parametrize("kind", ["csv.gz", "jsonl.gz"])
def test_amazon(kind, tmp_path):
    rows = [("AX", "B1", 5.0, 2000), ("AX", "B2", 1.0, 1000), ("AY", "B1", 4.0, 3000)]
    names = ("user_id", "parent_asin", "rating", "timestamp")
    if kind == "csv.gz":
        text = ",".join(names) + "\n" + "".join(",".join(map(str, row)) + "\n" for row in rows)
    else:
        text = "".join(
            json.dumps(dict(zip(names, row, strict=True)) | {"text": "good", "images": []}) + "\n"
            for row in rows
        )
    source = tmp_path / "All_Beauty"
    source.mkdir()
    (source / f"All_Beauty.{kind}").write_bytes(gzip.compress(text.encode()))
    (source / "meta_All_Beauty.jsonl").write_text(
        json.dumps({"parent_asin": "B1", "title": "Soap", "main_category": "Beauty", "price": 3})
        + "\n"
    )
    store = prepare("amazon-reviews", tmp_path / "out", Choices(source=source, k_core=1))
    assert sequences(store) == {"AX": [("B2", 1), ("B1", 2)], "AY": [("B1", 3)]}
    assert store.items.title(store.items.row("B1")) == "Soap" and store.items.find("B9") is None


def test_own_log_with_titles_dates_and_true_false(tmp_path, monkeypatch, capsys):
    text = "who,what,name,when,bought\nann,x-1,Soap,2020-01-02,True\nbob,x-2,Tea,2020-01-01,false\nann,x-2,Tea,2020-01-01,true\n"
    frame = pl.read_csv(text.encode(), try_parse_dates=True)
    frame.write_parquet(tmp_path / "log.parquet")
    columns = [
        "--user-column",
        "who",
        "--item-column",
        "what",
        "--time-column",
        "when",
        "--action-columns",
        "bought",
        "--title-column",
        "name",
    ]
    assert (
        run_cli(
            ["data", "prepare", tmp_path / "log.parquet", "--out", tmp_path / "out", *columns],
            monkeypatch,
        )
        == 0
    )
    store = SequenceStore.open(tmp_path / "out")
    assert sequences(store) == {
        "ann": [("x-2", 1577836800), ("x-1", 1577923200)],
        "bob": [("x-2", 1577836800)],
    }
    assert store.actions["bought"].tolist() == [1, 1, 0] and store.items.title(0) == "Soap"
    assert "2 users, 2 items, 3 behaviours" in capsys.readouterr().out


def test_dates_in_csv_are_read_as_utc_with_fractions_in_the_order(tmp_path):
    times = [
        "2020-01-01T00:00:01.9Z",
        "2020-01-01 00:00:01.1",
        "2020-01-01",
        "2020-01-01 00:01",
        "2020-01-01 00:00:01",
    ]
    (tmp_path / "log.csv").write_text(
        "user_id,item_id,timestamp\n" + "".join(f"1,{i},{time}\n" for i, time in enumerate(times))
    )
    new_year = 1577836800
    expected = [
        (2, new_year),
        (4, new_year + 1),
        (1, new_year + 1),
        (0, new_year + 1),
        (3, new_year + 60),
    ]
    assert sequences(prepare(tmp_path / "log.csv", tmp_path / "out")) == {1: expected}


def test_numbers_in_csv_become_numbers_and_leading_zeros_stay_text(tmp_path):
    (tmp_path / "log.csv").write_text("user_id,item_id,timestamp\n10,007,1\n9,7,2\n10,8,1.5\n")
    store = prepare(tmp_path / "log.csv", tmp_path / "out")
    assert sequences(store) == {9: [("7", 2)], 10: [("007", 1), ("8", 1)]}


def test_synthetic_is_seeded_and_has_what_it_promises(tmp_path):
    shape = Synthetic(users=300, items=400, topics=20, seed=4)
    store = prepare("synthetic", tmp_path / "a", Choices(synthetic=shape))
    assert store.digest == prepare("synthetic", tmp_path / "b", Choices(synthetic=shape)).digest
    assert (
        store.digest
        != prepare(
            "synthetic",
            tmp_path / "c",
            Choices(synthetic=Synthetic(users=300, items=400, topics=20, seed=5)),
        ).digest
    )
    assert store.num_users == 300 and store.lengths_U.min() >= 5
    topic_N = store.item_features["topic"].codes[store.items_N]
    shares = []
    for user in range(store.num_users):
        counts = np.sort(np.bincount(topic_N[store.offsets_U1[user] : store.offsets_U1[user + 1]]))[
            ::-1
        ]
        shares.append(counts[:3].sum() / counts.sum())
    assert np.mean(shares) > 0.8  # lasting interests: three of twenty topics
    counts_V = np.sort(np.bincount(store.items_N, minlength=store.num_items))[::-1]
    assert counts_V[:20].sum() > 0.25 * store.num_behaviours  # popularity is far from even
    assert store.actions["like"].sum() < store.actions["click"].sum() < store.num_behaviours
    assert (store.actions["like"] <= store.actions["click"]).all()


def test_kuairand_lengths_fit_the_published_median(tmp_path):
    from slipstream.data.synthetic import draw_lengths

    shape = with_lengths(Synthetic(), "kuairand-1k")
    lengths = draw_lengths(shape, 50_000, np.random.default_rng(0))
    assert np.median(lengths) == pytest.approx(np.exp(8.125), rel=0.03)
    assert lengths.min() >= 10 and lengths.max() == 49_332


def test_inspect_prints_statistics_and_draws(tmp_path, monkeypatch, capsys):
    prepare(
        "ml-1m",
        tmp_path / "out",
        Choices(source=movielens_1m(tmp_path / "ml-1m"), min_item_count=1),
    )
    assert run_cli(["data", "inspect", tmp_path / "out"], monkeypatch) == 0
    printed = capsys.readouterr().out
    assert "inspect.png" in printed and "density" in printed
    assert (tmp_path / "out" / "inspect.png").read_bytes().startswith(b"\x89PNG")
    store = SequenceStore.open(tmp_path / "out")
    assert tie_share(store) == pytest.approx(2 / 5)
    assert (
        statistics(store)["density"] == "83.3333%" and statistics(store)["digest"] == store.digest
    )
