"""MovieLens-1M grows by time: later users and movies are appended, training goes on, exactly."""

import polars as pl
import pytest
import torch

from slipstream.cli.app import run_command
from slipstream.data.catalogue import ENTRIES
from slipstream.data.download import extract, fetch
from slipstream.data.store import SequenceStore
from slipstream.errors import SlipstreamError
from slipstream.training.recommendation import recommend
from slipstream.training.run import open_run
from tests.support.grown_steps import steps_without_a_stop
from tests.support.training_fixtures import same_tensors

pytestmark = pytest.mark.slow
BEFORE, AFTER = 30, 60  # steps on the earlier log, and in all
COLUMNS = ("user", "item", "time")


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """The log before and after the moment when a tenth of the users and movies is still to come."""
    place = tmp_path_factory.mktemp("movielens")
    try:
        archive = fetch(ENTRIES["ml-1m"].remote, lambda *_: None)
        root = archive if archive.is_dir() else place / "unpacked"
        for zipped in [archive] if archive.is_file() else archive.glob("*.zip"):
            root = place / "unpacked"
            extract(zipped, root)
        frame = ENTRIES["ml-1m"].read(root).frame.select(COLUMNS).collect()
    except SlipstreamError as error:
        pytest.skip(f"MovieLens-1M cannot be fetched here: {error}")
    firsts = [frame.group_by(name).agg(pl.col("time").min()) for name in COLUMNS[:2]]
    moment = min(each["time"].quantile(0.9, "lower") for each in firsts)
    paths = [place / "earlier.csv", place / "later.csv"]
    frame.filter(pl.col("time") < moment).write_csv(paths[0])
    frame.filter(pl.col("time") >= moment).write_csv(paths[1])
    return paths


def slipstream(*words: object) -> None:
    assert run_command([str(word) for word in words]) == 0


def test_a_tenth_of_new_users_and_movies_is_appended_and_recommended(logs, tmp_path):
    earlier, later = logs
    base_path, grown_path, run = (tmp_path / name for name in ("base", "grown", "run"))
    named = ["--user-column", "user", "--item-column", "item", "--time-column", "time"]
    slipstream("data", "prepare", earlier, *named, "--out", base_path)
    common = ["evaluate_every=0", "threads=1", "--out", run]
    train = ["train", "ml-1m-hstu", "schedule=synchronous", *common]
    slipstream(*train, f"data={base_path}", f"max_steps={BEFORE}")
    slipstream("data", "append", base_path, later, "--out", grown_path)
    slipstream(*train, f"data={grown_path}", f"max_steps={AFTER}")
    base, grown = SequenceStore.open(base_path), SequenceStore.open(grown_path)
    assert grown.num_users >= base.num_users / 0.9 and grown.num_items >= base.num_items / 0.9

    recipe, _, continued = open_run(run, grown)
    whole = steps_without_a_stop(recipe, base, grown, BEFORE, AFTER)
    for name, table in whole.tables.tables.items():
        assert torch.equal(table.all_rows(), continued.tables.tables[name].all_rows()), name
    assert same_tensors(whole.model.state_dict(), continued.model.state_dict())

    new_items = set(range(base.num_items, grown.num_items))
    answers = recommend(continued, grown, range(grown.num_users), 10)
    assert new_items & {item for answer in answers for item in answer.items}
    slipstream("recommend", run, "--user", grown.users.id(grown.num_users - 1))
