"""The data sets known by name: address, md5, reader and customary filters.

Touch this to add a data set.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.data.amazon import category_name, read_amazon
from slipstream.data.download import Registry, Remote
from slipstream.data.ingest import Filters
from slipstream.data.kuairand import read_kuairand
from slipstream.data.movielens import read_movielens
from slipstream.data.raw_log import RawLog

GROUPLENS = "https://files.grouplens.org/datasets/movielens"
ZENODO = "https://zenodo.org/records/10439422/files"
AMAZON = "https://mcauleylab.ucsd.edu/public_datasets/data/amazon_2023/benchmark/0core/rating_only"
RECBOLE = "recbole/dataset_example/ml-100k/ml-100k"


@dataclass(frozen=True)
class Entry:
    """A data set of the catalogue: its `filters` apply unless the user chooses others."""

    about: str
    read: Callable[[Path], RawLog]
    remote: Remote
    filters: Filters = field(default_factory=Filters)
    terms: str = "see the data set's own README"


_RESEARCH = "research use, no redistribution (GroupLens)"
_SHARE_ALIKE = "CC BY-SA 4.0"

ENTRIES: dict[str, Entry] = {
    "ml-1m": Entry(
        "MovieLens 1M; items with fewer than 5 ratings dropped and ties in file order, as "
        "SASRec's file has it",
        read_movielens,
        Remote(
            f"{GROUPLENS}/ml-1m.zip",
            md5="c4d9eecfca2ab87c1945afe126590906",
            registry=Registry(
                "scikit-rec==0.3.0",
                ("scikit_rec-0.3.0/examples/data/movielens-1m/ml-1m.zip",),
                source_archive=True,
            ),
        ),
        Filters(min_item_count=5),
        _RESEARCH,
    ),
    "ml-100k": Entry(
        "MovieLens 100K",
        read_movielens,
        Remote(
            f"{GROUPLENS}/ml-100k.zip",
            md5="0e33842e24a9c977be4e0107933c0723",
            registry=Registry(
                "recbole==1.2.1", (f"{RECBOLE}.inter", f"{RECBOLE}.item", f"{RECBOLE}.user")
            ),
        ),
        terms=_RESEARCH,
    ),
    "ml-latest-small": Entry(
        "MovieLens latest-small (changes over time, so no md5 is known)",
        read_movielens,
        Remote(f"{GROUPLENS}/ml-latest-small.zip"),
    ),
    "ml-20m": Entry(
        "MovieLens 20M",
        read_movielens,
        Remote(f"{GROUPLENS}/ml-20m.zip", md5="cd245b17a1ae2cc31bb14903e1204af3"),
        Filters(min_item_count=5),
        _RESEARCH,
    ),
    "kuairand-pure": Entry(
        "KuaiRand-Pure, the standard log",
        read_kuairand,
        Remote(f"{ZENODO}/KuaiRand-Pure.tar.gz", md5="0820331067a3784d9691136f772b35a7"),
        terms=_SHARE_ALIKE,
    ),
    "kuairand-1k": Entry(
        "KuaiRand-1K, the standard log",
        read_kuairand,
        Remote(
            f"{ZENODO}/KuaiRand-1K.tar.gz",
            md5="6b0b9c8222d67fcd4c676218edca3f1f",
            max_bytes=4 << 30,
        ),
        terms=_SHARE_ALIKE,
    ),
    "kuairand-27k": Entry(
        "KuaiRand-27K, the standard log (46 GB unpacked)",
        read_kuairand,
        Remote(
            f"{ZENODO}/KuaiRand-27K.tar.gz",
            md5="3e3c799a24e2d23a4d2c757fbf9adf59",
            max_bytes=20 << 30,
        ),
        terms=_SHARE_ALIKE,
    ),
    "amazon-reviews": Entry(
        "Amazon Reviews 2023, ratings of one category (--category), 5-core",
        read_amazon,
        Remote(f"{AMAZON}/{{category}}.csv.gz", max_bytes=4 << 30),
        Filters(k_core=5),
    ),
}

NAMES = (*ENTRIES, "synthetic")


def remote_of(name: str, category: str) -> Remote:
    """Return the archive of an entry, with the category filled in if the entry has categories."""
    remote = ENTRIES[name].remote
    if "{category}" not in remote.url:
        return remote
    return Remote(
        remote.url.format(category=category_name(category)),
        remote.md5,
        remote.max_bytes,
        remote.registry,
    )
