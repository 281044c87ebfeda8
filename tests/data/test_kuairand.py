"""The standard log of KuaiRand in miniature, as CSV and Parquet."""

import polars as pl
import pytest

from slipstream.data.preparation import Choices, prepare
from tests.support.data_fixtures import sequences


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_standard_logs_are_joined_with_signals_and_features(kind, tmp_path):
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
