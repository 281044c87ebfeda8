"""Real lengths come from the first folder that has the data set, in any of its forms."""

import gzip

import pytest

from slipstream.bench.history_lengths import real_lengths
from tests.support.training_fixtures import small_store


@pytest.fixture
def folders(tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    monkeypatch.setenv("SLIPSTREAM_DATA", f"{first}:{second}")
    return first, second


def test_no_folder_has_it(folders):
    assert real_lengths("ml-1m") is None


def test_a_prepared_store_of_a_later_folder_is_found(folders):
    store = small_store(folders[1] / "ml-1m")
    assert real_lengths("ml-1m").tolist() == store.lengths_U.tolist()


def test_counted_lengths_are_read_as_they_are(folders):
    (folders[0] / "kuairand-1k").mkdir(parents=True)
    counted = folders[0] / "kuairand-1k" / "standard_log_length_per_user.csv.gz"
    with gzip.open(counted, "wt") as file:
        file.write("user_id,n_standard\n0,7\n1,12\n")
    assert real_lengths("kuairand-1k").tolist() == [7, 12]


def test_a_folder_that_holds_something_else_is_passed_over(folders):
    (folders[0] / "ml-1m").mkdir(parents=True)
    store = small_store(folders[1] / "ml-1m")
    assert real_lengths("ml-1m").tolist() == store.lengths_U.tolist()
