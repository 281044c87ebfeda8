"""What a person types becomes items: case, accents, order, ids."""

import numpy as np
import pyarrow as pa
import pytest

from slipstream.serving.engine.title_search import TitleSearch, fold_text

TITLES = [
    "Toy Story (1995)",
    "Amélie (2001)",
    "Story of Us, The (1999)",
    None,
    "Historys",
    "toy",
    "A Toy Soldier",
    "ŁÓDŹ Straße",
]


def search(ids: list, titles: list | None = None) -> TitleSearch:
    numbers = np.array(ids, dtype=np.int64 if isinstance(ids[0], int) else object)
    return TitleSearch(numbers, None if titles is None else pa.array(titles))


@pytest.mark.parametrize(
    ("query", "rows"),
    [
        ("toy", [5, 0, 6]),  # the whole title, then its start, then the start of a word
        ("STORY", [2, 0, 4]),  # "Historys" has it within a word
        ("amelie", [1]),
        ("AMÉL", [1]),
        ("łódź", [7]),
        (" story (", [0]),
        ("104", [3]),  # an id
        ("10", []),  # no part of an id that is a number
        ("%", []),
        ("(1995", [0]),
    ],
)
def test_titles_are_found_without_case_and_accents_the_best_first(query: str, rows: list[int]):
    titles = search([101, 102, 103, 104, 105, 106, 107, 108], TITLES)
    assert titles.find(query, 10).tolist() == rows


def test_text_ids_are_searched_like_titles_and_count_bounds_the_answer():
    skus = search(["LAM/0001-X", "LAM/0010-X", "RUG/0001-X"], ["Lamp", "Lamp No. 10", "A lamb"])
    assert skus.find("lam/", 10).tolist() == [0, 1]
    assert skus.find("lam", 2).tolist() == [0, 1]
    assert skus.find("rug", 5).tolist() == [2]


@pytest.mark.parametrize("query", ["  ", "́"])
def test_nothing_is_found_for_nothing(query: str):
    assert search([1, 2], ["a", "b"]).find(query, 5).tolist() == []


def test_a_catalogue_without_titles_is_searched_by_id():
    assert search([7, 8]).find("8", 5).tolist() == [1]
    assert search([7, 8]).find("9" * 30, 5).tolist() == []


def test_folding_keeps_what_is_not_known():
    assert fold_text(pa.array(["É", None])).to_pylist() == ["e", None]
