"""train, load and compare: what they take, and one sentence for every wrong call."""

from pathlib import Path

import polars as pl
import pytest
import torch

import slipstream as ss
from slipstream import api
from slipstream.errors import SlipstreamError
from slipstream.files import read_json
from tests.support.api_runs import TINY, prepare_and_train
from tests.support.training_fixtures import small_recipe, small_store


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a store, a run and a bundle."""
    place = tmp_path_factory.mktemp("functions")
    prepare_and_train(place).export(place / "bundle")
    return place


def test_a_store_is_given_as_itself_or_as_its_directory(place):
    store = api.open_store(place / "store")
    assert api.open_store(store) is store
    with pytest.raises(SlipstreamError, match="the recipe names no data"):
        api.open_store(None)


def test_a_store_alone_is_trained_with_the_default_recipe(place, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for given in (ss.load(place / "store"), place / "store", str(place / "store")):
        run = ss.train(given, epochs=1, quiet=True, model=TINY["model"], threads=1)
        assert run.directory == Path("runs/store")
        assert run.recipe.model.dim == 8 and run.recipe.tables.optimizer == "rowwise_adam"


def test_settings_come_as_sections_full_names_or_short_ones(place, tmp_path):
    store = ss.load(place / "store")
    for n, settings in enumerate(
        (
            {"model": {"dim": 16, "heads": 1}, "train": {"epochs": 1}},
            {"model__dim": 16, "model__heads": 1, "train__epochs": 1},
            {"dim": 16, "heads": 1, "epochs": 1},
        )
    ):
        run = ss.train(store, out=tmp_path / f"{n}", quiet=True, threads=1, max_steps=1, **settings)
        recipe = run.recipe
        assert (recipe.model.dim, recipe.model.heads, recipe.train.epochs) == (16, 1, 1)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_recipe_comes_first_or_by_name(place, tmp_path, by_name):
    small = {"model": TINY["model"], "negatives": 4, "threads": 1, "max_steps": 1}
    given = () if by_name else ("ml-1m-hstu",)
    named = {"recipe": "ml-1m-hstu"} if by_name else {}
    run = ss.train(
        *given, data=place / "store", out=str(tmp_path / "run"), quiet=True, **named, **small
    )
    assert read_json(run.directory / "run.json")["step"] == 1
    assert run.recipe.name == "ml-1m-hstu" and run.report().is_file()


def test_a_recipe_object_takes_no_overrides(tmp_path):
    with pytest.raises(SlipstreamError, match="model_copy"):
        ss.train(small_recipe(), "max_steps=1", data=small_store(tmp_path / "store"))


def test_another_run_is_replaced_only_by_force(place, tmp_path):
    store = ss.load(place / "store")
    settings = {"out": tmp_path / "run", "quiet": True, "max_steps": 1, "threads": 1}
    ss.train(store, dim=8, **settings)
    with pytest.raises(SlipstreamError, match="force=True to replace it"):
        ss.train(store, dim=16, **settings)
    assert ss.train(store, dim=16, force=True, **settings).recipe.model.dim == 16


def test_load_opens_what_is_there(place):
    assert isinstance(ss.load(place / "store"), ss.SequenceStore)
    assert isinstance(ss.load(str(place / "run")), ss.Run)
    assert isinstance(ss.load(place / "bundle", data=place / "store"), ss.BundleModel)


def test_compare_shows_what_differs_and_the_figures(place, tmp_path):
    other = ss.train(
        place / "store", out=tmp_path / "wider", quiet=True, **(TINY | {"model__dim": 16})
    )
    other.evaluate()
    table = ss.compare([place / "run", other])
    assert table["run"].to_list() == [str(place / "run"), str(tmp_path / "wider")]
    assert table["model.dim"].to_list() == [8, 16] and "model.blocks" not in table.columns
    assert table["test HR@10"].to_list() == [None, other.note["test"]["HR@10"]]
    assert "validation HR@10" in table.columns and "validation HR@5" not in table.columns
    chosen = ss.compare([str(place / "run"), other], metrics=["HR@5"])
    assert [name for name in chosen.columns if "@" in name] == ["validation HR@5", "test HR@5"]


def close_ones(places: torch.Tensor) -> float:
    return float((places <= 3).double().mean())


def wrong_shape(inputs) -> torch.Tensor:
    return torch.zeros(3, requires_grad=True)


def fails(places: torch.Tensor) -> float:
    raise ValueError("no")


TRAIN = {"quiet": True, "max_steps": 1, "threads": 1}
WRONG = {
    "prepare: an old name": (lambda p, o: ss.prepare("x.csv", user_column="u"), "mean 'user'?"),
    "prepare: columns": (lambda p, o: ss.prepare("x.csv", columns={}), "user=…, item=…, time=…"),
    "prepare: a near name": (lambda p, o: ss.prepare("x.csv", usr="u"), "did you mean 'user'?"),
    "prepare: no data": (lambda p, o: ss.prepare(), "give a data set, a log or a query (sql)"),
    "prepare: a number": (lambda p, o: ss.prepare(7, o), "a log is a path"),
    "prepare: no file": (lambda p, o: ss.prepare(o / "no.csv", o / "s"), "no.csv"),
    "prepare: no such set": (lambda p, o: ss.prepare("ml-1n", o), "did you mean 'ml-1m'?"),
    "prepare: user is a list": (lambda p, o: ss.prepare("x.csv", user=["u"]), "name of a column"),
    "prepare: actions is 3": (lambda p, o: ss.prepare("x.csv", actions=3), "list of columns"),
    "prepare: out is 3": (lambda p, o: ss.prepare("x.csv", 3), "out must be a path"),
    "prepare: no such column": (
        lambda p, o: ss.prepare(
            pl.DataFrame({"user_id": [1], "sku": [1]}), o, item="sk", time=None
        ),
        "did you mean 'sku'?",
    ),
    "prepare: unknown choice": (lambda p, o: ss.prepare("x.csv", o, nulls="dorp"), "mean 'drop'?"),
    "train: nothing": (lambda p, o: ss.train(), "needs a store or a recipe"),
    "train: a frame": (lambda p, o: ss.train(pl.DataFrame()), "but got a DataFrame"),
    "train: no such recipe": (lambda p, o: ss.train("ml-1m-hst"), "did you mean 'ml-1m-hstu'?"),
    "train: a wrong key": (lambda p, o: ss.train(p / "store", model={"dmi": 8}), "'model.dim'?"),
    "train: a wrong word": (lambda p, o: ss.train(p / "store", epoch=3), "mean 'epochs'?"),
    "train: a wrong value": (lambda p, o: ss.train(p / "store", model={"dim": "x"}), "model.dim"),
    "train: a wrong section": (lambda p, o: ss.train(p / "store", model=8), "model"),
    "train: two stores": (lambda p, o: ss.train(p / "store", data=p / "store"), "two stores"),
    "train: two recipes": (lambda p, o: ss.train("demo", recipe="demo"), "two recipes"),
    "train: a second value": (lambda p, o: ss.train(p / "store", 3), "but got 3 too"),
    "train: no data": (lambda p, o: ss.train("retrieval-default"), "names no data"),
    "train: a lambda": (
        lambda p, o: ss.train(p / "store", metric=lambda x: 1),
        "write it with def",
    ),
    "train: metric is 3": (lambda p, o: ss.train(p / "store", metric=3), "write it with def"),
    "train: loss is 3": (lambda p, o: ss.train(p / "store", loss=3), "loss"),
    "train: a loss of another shape": (
        lambda p, o: ss.train(p / "store", out=o / "r", loss=wrong_shape, **TRAIN),
        "'wrong_shape' must return one value per token",
    ),
    "train: a metric that fails": (
        lambda p, o: ss.train(p / "store", out=o / "r", metric=fails, **TRAIN),
        "the metric function 'fails' failed (no)",
    ),
    "train: an unknown metric": (
        lambda p, o: ss.train(p / "store", out=o / "r", metric="HR@11", **TRAIN),
        "did you mean 'HR@1'?",
    ),
    "train: own loss and ranking": (
        lambda p, o: ss.train("kuairand-pure-ranking", data=p / "store", loss=wrong_shape),
        "own metrics and losses are for retrieval",
    ),
    "load: nothing there": (lambda p, o: ss.load(o / "no"), "is not there"),
    "load: nothing of ours": (lambda p, o: ss.load(o), "holds neither a run nor a bundle"),
    "load: a number": (lambda p, o: ss.load(7), "path must be a path"),
    "load: a store with data": (lambda p, o: ss.load(p / "store", p / "store"), "a store itself"),
    "load: no argument": (lambda p, o: ss.load(), "needs 'path'"),
    "compare: one path": (lambda p, o: ss.compare(p / "run"), "a list of runs"),
    "compare: too few": (lambda p, o: ss.compare([p / "run"]), "at least two"),
    "compare: no run": (lambda p, o: ss.compare([p / "run", p / "store"]), "holds no run"),
    "Run: no run": (lambda p, o: ss.Run(o), "is not a run"),
    "recommend: count": (lambda p, o: ss.load(p / "run").recommend(5, count=3), "mean 'k'?"),
    "recommend: k": (lambda p, o: ss.load(p / "run").recommend(5, 0), "k must be at least 1"),
    "recommend: no such user": (lambda p, o: ss.load(p / "run").recommend(6), "user '6' is not"),
    "recommend: a float": (lambda p, o: ss.load(p / "run").recommend(5.0), "users must be an id"),
    "recommend: repeat": (lambda p, o: ss.load(p / "run").recommend(5, repeat="no"), "repeat 'no'"),
    "recommend: filter": (lambda p, o: ss.load(p / "run").recommend(5, filter=[1.5]), "items must"),
    "recommend: a time": (
        lambda p, o: ss.load(p / "run").recommend(5, request_time="now"),
        "request_time must be a whole number",
    ),
    "recommend: a past time": (
        lambda p, o: ss.load(p / "run").recommend(5, request_time=3),
        "before the last behaviour",
    ),
    "score: no items": (lambda p, o: ss.load(p / "run").score(5), "give items=[…]"),
    "score: no such item": (lambda p, o: ss.load(p / "run").score(5, [3]), "item '3' is not"),
    "similar: two items": (lambda p, o: ss.load(p / "run").similar_items([1, 2]), "one item"),
    "vectors: a typo": (lambda p, o: ss.load(p / "run").item_vectors(itms=[1]), "mean 'items'?"),
    "evaluate: split": (lambda p, o: ss.load(p / "run").evaluate("tset"), "did you mean 'test'?"),
    "evaluate: protocol": (lambda p, o: ss.load(p / "run").evaluate(protocol="x"), "protocol 'x'"),
    "export: itself": (lambda p, o: ss.load(p / "run").export(p / "run"), "its own input"),
    "export: a number": (lambda p, o: ss.load(p / "run").export(3), "out must be a path"),
    "export: nowhere": (lambda p, o: ss.load(p / "run").export(), "needs 'out'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_is_one_sentence_and_writes_nothing(case, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    call, sentence = WRONG[case]
    with pytest.raises(SlipstreamError) as error:
        call(place, tmp_path / "empty")
    text = str(error.value)
    assert sentence in text and "\n" not in text and "--" not in text
    left = {path.name for path in tmp_path.rglob("*")} - {"empty"}
    assert not left or case.startswith(("train: a loss", "train: a metric", "train: an unknown"))
