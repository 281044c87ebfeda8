"""The recommend benchmark: its traces, its brute force, and that a wrong search is found out."""

import numpy as np
import torch

from benchmarks.recommend.catalogues import DrawnRows, write_catalogue
from benchmarks.recommend.open_loop import GAP, make_trace
from benchmarks.recommend.searches import count_different, search_near_rows, search_users
from slipstream.serving.engine.engine import Engine


def test_rows_are_drawn_alike_whoever_reads_them():
    rows = DrawnRows("clustered", 70_000)
    every = torch.cat([rows_CD for _, rows_CD in rows.tiles()])
    chosen = torch.tensor([69_999, 3, 65_536])
    assert torch.equal(rows.take(chosen), every[chosen])


def test_searches_are_compared_with_brute_force(tmp_path):
    searched = write_catalogue(tmp_path / "b", "lengths", 60_000)
    engine = Engine(tmp_path / "b")
    for found in (search_users(engine, 2), search_near_rows(engine, 2)):
        assert len(found.seconds) == 2 and count_different(found, searched) == 0
        found.found[1] = found.found[0]
        assert count_different(found, searched) == 1


def test_traces_have_their_rate_and_their_pages():
    once, sessions = (make_trace(kind, 10.0, 60.0) for kind in ("once", "sessions"))
    assert len({page.user for page in once}) == len(once)
    for trace in (once, sessions):
        assert 400 < len(trace) < 700 and trace == sorted(trace, key=lambda page: page.at)
    first = {page.user: page.at for page in sessions if page.number == 0}
    assert all(np.isclose(page.at - first[page.user], GAP * page.number) for page in sessions)
