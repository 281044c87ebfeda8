"""The catalogue is complete, and its addresses, digests and filters are careful."""

from slipstream.data import download as download_module
from slipstream.data.catalogue import ENTRIES, NAMES, remote_of


def test_every_entry_has_a_secure_address_and_known_releases_their_md5():
    assert set(NAMES) >= {
        "ml-1m",
        "ml-100k",
        "ml-latest-small",
        "ml-20m",
        "kuairand-pure",
        "kuairand-1k",
        "kuairand-27k",
        "synthetic",
    }
    assert ENTRIES["ml-1m"].remote.md5 == "c4d9eecfca2ab87c1945afe126590906"
    assert ENTRIES["ml-1m"].filters.min_item_count == 5
    assert remote_of("amazon-reviews", "Video_Games").url.endswith("/Video_Games.csv.gz")
    assert all(entry.remote.url.startswith("https://") for entry in ENTRIES.values())
    assert download_module.TIMEOUT_SECONDS <= 10


def test_a_category_is_filled_in_where_an_entry_has_categories():
    assert remote_of("amazon-reviews", "Video_Games").file_name == "Video_Games.csv.gz"
    assert remote_of("ml-1m", "Video_Games") == ENTRIES["ml-1m"].remote
