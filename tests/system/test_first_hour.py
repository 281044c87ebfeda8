"""A newcomer's first hour with a shop's log as it is: one command a step, then the same in Python.

prepare, train, evaluate, recommend, export, import of the histories, serve, answers over HTTP with
SKUs and titles, and the same on the page in Chromium. What `evaluate` says is what `recommend` and
the server give, user by user.
"""

import functools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import slipstream as ss
from slipstream.serving.http.client import Client
from tests.support.browser import Watched, chromium, needs_browser
from tests.support.serve_command import KEY, served
from tests.support.shop_log import Shop, sku, write_shop

LONG = 120.0  # seconds; only ends a command that hangs
FEATURES = "item_features=[category, colours, price]"
SMALL = ("epochs=5", "model.dim=16", "threads=1")
COLUMNS = ("--user-column", "customer", "--item-column", "sku", "--time-column", "when")
OF_ITEMS = ("--item-id", "sku", "--item-title", "name", "--item-features", "category,colours,price")


@dataclass(frozen=True)
class Place:
    """The folder a newcomer works in."""

    folder: Path
    shop: Shop

    def run(self, *words: str) -> str:
        """Run one command as typed; return what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "slipstream", *words],
            cwd=self.folder,
            env={**os.environ, "COLUMNS": "120", "SLIPSTREAM_API_KEY": KEY},
            capture_output=True,
            text=True,
            timeout=LONG,
            check=False,
        )
        assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    @functools.cache  # noqa: B019 (one place for the whole module)
    def figures(self, *words: str) -> dict[str, float]:
        """The figures of `slipstream evaluate`."""
        return json.loads(self.run("evaluate", *words, "--json"))["figures"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The shop's log, prepared and trained by the commands a newcomer types."""
    folder = tmp_path_factory.mktemp("shop")
    here = Place(folder, write_shop(folder))
    told = here.run(
        *("data", "prepare", "events.csv", *COLUMNS, "--action-columns", "what"),
        *("--items", "items.csv", *OF_ITEMS, "--multi-separator", "|", "--out", "data/shop"),
    )
    assert f"{here.shop.nulls}" in told and f"{here.shop.duplicates}" in told
    for repeat in ("exclude", "allow"):
        out = f"runs/{repeat}"
        words = ("train", "retrieval-default", "data=data/shop", f"repeat={repeat}", FEATURES)
        here.run(*words, *SMALL, "--out", out)
        here.run("export", out, "--out", f"bundles/{repeat}")
    here.run("history", "import", "data/shop", "--history", "sqlite:history.db")
    return here


def test_the_log_is_prepared_as_it_is_and_says_what_it_dropped(place: Place):
    shop, store = place.shop, ss.load(place.folder / "data/shop")
    assert store.num_behaviours == shop.rows - shop.nulls - shop.duplicates
    facts = json.loads(place.run("data", "inspect", "data/shop", "--json"))
    assert facts["users"] == store.num_users and 0.2 < facts["repeats"] < 0.6


def test_evaluate_shows_the_baseline_and_the_share_of_repeats(place: Place):
    text = place.run("evaluate", "runs/exclude")
    assert "popularity" in text and "repeats" in text
    figures = place.figures("runs/allow")
    assert figures["HR@10"] > figures["popularity HR@10"]


def test_recommend_answers_with_skus_and_titles(place: Place):
    text = place.run("recommend", "runs/exclude", "--user", "c/0001", "--count", "5")
    assert re.search(r"No\. \d+", text)
    rows = json.loads(place.run("recommend", "runs/exclude", "--user", "c/0001", "--json"))
    assert len(rows["items"]) == 10 and all("/" in row["item"] for row in rows["items"])
    assert all("No." in row["title"] for row in rows["items"])


@pytest.mark.parametrize("repeat", ["exclude", pytest.param("allow", marks=pytest.mark.slow)])
def test_what_is_evaluated_is_what_is_served_to_the_last_user(place: Place, repeat: str):
    run = f"runs/{repeat}"
    offline = place.figures(run)
    with served(place.folder / "bundles" / repeat) as (url, _):
        live = place.figures(run, "--as-served", url)
    assert 0 < offline["HR@10"] < 1 and offline["repeats"] > 0.2
    for name in ("HR@10", "HR@50", "HR@200", "users", "repeats"):
        assert live[name] == pytest.approx(offline[name], abs=1e-12)
    assert live["NDCG@10"] == pytest.approx(offline["NDCG@10"], abs=1e-9)


def test_trained_users_are_known_and_events_change_the_answer(place: Place):
    stored = f"sqlite:{place.folder / 'history.db'}"
    bundle = place.folder / "bundles" / "exclude"
    with served(bundle, "--history", stored) as (url, _), Client(url, KEY) as client:
        before = client.recommend("c/0001", count=5, titles=True)
        assert all(isinstance(item, str) for item in before.items)
        assert before.titles is not None and all("No." in str(title) for title in before.titles)
        client.events("c/0001", [before.items[0]])
        after = client.recommend("c/0001", count=5)
        assert before.items[0] not in after.items
        ranked = client.rank("c/0001", [sku(3), "no such sku", sku(4)])
        assert ranked.items == [sku(3), sku(4)] and ranked.unknown == ["no such sku"]
        text = place.run("client", "recommend", "c/0001", "--url", url, "--titles")
        assert "No." in text


@needs_browser
@pytest.mark.timeout(240)
def test_the_hour_ends_on_the_page_with_titles_and_skus(place: Place):
    stored = f"sqlite:{place.folder / 'history.db'}"
    bundle = place.folder / "bundles" / "exclude"
    with served(bundle, "--history", stored) as (url, _):
        with Client(url, KEY) as client:
            known = client.user("c/0001", limit=1).behaviours
        with chromium() as browser:
            _add_on_the_page(browser.new_page(viewport={"width": 1440, "height": 900}), url, known)


def _add_on_the_page(page: Any, url: str, known: int) -> None:
    """Open the page of a customer with `known` behaviours, add items, see the answer change."""
    page.set_default_timeout(1000 * LONG / 2)
    web = Watched(page, url)
    page.goto(f"{url}/?user=c%2F0001&at={known}")
    page.get_by_label("API key").fill(KEY)
    page.get_by_role("button", name="Use this key").click()
    before = _named_rows(page)
    assert len(before) == 10
    history = page.get_by_role("list", name="History, newest first").get_by_role("listitem")
    assert history.count() == known
    assert re.search(r"No\. \d+\s+[A-Z]{3}/\d{4}-X", history.first.inner_text())
    title, named = before[0]
    page.get_by_role("button", name=f"Add {title} to the history", exact=True).click()
    page.wait_for_function(
        "named => document.querySelector('ol.ranked:not([aria-busy=true])')"
        " && !document.querySelector('ol.ranked').innerText.includes(named)",
        arg=named,
    )
    after = _named_rows(page)
    assert history.count() == known + 1 and named in history.first.inner_text()
    assert after != before and (title, named) not in after
    page.get_by_role("combobox", name="Add a title").fill(sku(3))
    page.get_by_role("option", name=sku(3)).click()
    history.first.get_by_text(sku(3)).wait_for()
    unauthorised = [text for text in web.errors if "401" in text]  # before the key was given
    assert web.errors == unauthorised and web.foreign == []


def _named_rows(page: Any) -> list[tuple[str, str]]:
    """Title and SKU of each recommended item, as shown."""
    rows = page.locator("ol.ranked:not([aria-busy=true]) > li .name")
    rows.first.wait_for()
    texts = [text.split("\n") for text in rows.all_inner_texts()]
    found = [(title.strip(), note.split(" · ")[0].strip()) for title, note in texts]
    assert all("No." in title and re.fullmatch(r"[A-Z]{3}/\d{4}-X", name) for title, name in found)
    return found


def test_the_same_hour_in_python(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    events = pl.read_csv(place.shop.events, separator=";")
    store = ss.prepare(
        events,
        user="customer",
        item="sku",
        time="when",
        actions=["what"],
        items=pl.read_csv(place.shop.items),
        item_features=["category", "colours", "price"],
        item_title="name",
        out="data/shop",
    )
    run = ss.train(store, model={"dim": 16}, epochs=2, threads=1, quiet=True)
    figures = run.evaluate()
    assert figures["users"] > 200 and figures["popularity HR@10"] > 0
    answer = run.recommend(["c/0001", "c/0002"], k=3)
    assert answer.columns == ["user", "rank", "item", "score", "title"] and answer.height == 6
    bundle = ss.load(run.export(tmp_path / "bundle"))
    again = bundle.recommend(histories={"c/0001": _history(store, "c/0001")}, k=3)
    assert again["item"].to_list() == answer.filter(user="c/0001")["item"].to_list()
    similar = run.similar_items(sku(3), k=4)
    assert similar.height == 4 and sku(3) not in similar["item"].to_list()


def _history(store: ss.SequenceStore, user: str) -> ss.History:
    """A user's whole log by original ids."""
    row = store.users.row(user)
    span = slice(int(store.offsets_U1[row]), int(store.offsets_U1[row + 1]))
    items = [store.items.id(int(item)) for item in store.items_N[span]]
    return ss.History(items, store.timestamps_N[span].copy())
