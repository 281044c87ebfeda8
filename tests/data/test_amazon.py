"""One category of Amazon Reviews in miniature, as CSV and JSON lines."""

import gzip
import json

import pytest

from slipstream.data.amazon import category_name, read_amazon
from slipstream.data.preparation import Choices, prepare
from slipstream.errors import SlipstreamError
from tests.support.data_fixtures import sequences


@pytest.mark.parametrize("kind", ["csv.gz", "jsonl.gz"])
def test_reviews_and_titles_become_a_store(kind, tmp_path):
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


def test_a_category_is_a_name_and_never_a_path():
    assert category_name("Video_Games") == "Video_Games"
    for name in ("../x", "", "a b", "x" * 70):
        with pytest.raises(SlipstreamError, match="not an Amazon category"):
            category_name(name)


def test_a_folder_without_exactly_one_log_is_refused(tmp_path):
    with pytest.raises(SlipstreamError, match=r"should hold one file of Amazon reviews .* found 0"):
        read_amazon(tmp_path)
