"""The page in the system's Chromium, as a person uses it: every view, by mouse and by keyboard.

With SLIPSTREAM_PICTURES=1 the pictures of docs/images are taken anew.
"""

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.app import run_command
from tests.support.browser import Watched, chromium, needs_browser
from tests.support.film_log import write_films

pytestmark = [pytest.mark.system, needs_browser, pytest.mark.timeout(240)]
ROOT = Path(__file__).parent.parent.parent
LONG = 60_000  # milliseconds; only ends a test that hangs
TINY = ("threads=1", "model.dim=32", "blocks=2", "heads=2", "sampler.batch_size=32")
SIZES = {"wide": (1440, 900), "phone": (360, 780)}
VIEWS = ("recommend", "training", "pipeline", "fleet", "scale", "slices")


def train(place: Path, name: str, *overrides: str) -> Path:
    words = ["train", "retrieval-default", f"data={place / 'data'}", *TINY, *overrides]
    assert run_command([*words, "--out", str(place / "runs" / name)]) == 0
    return place / "runs" / name


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Films, two runs of two schedules, both exported."""
    folder = tmp_path_factory.mktemp("films")
    events, films = write_films(folder)
    columns = ["--user-column", "viewer", "--item-column", "film", "--time-column", "when"]
    about = ["--item-features", "genres", "--item-title", "title", "--multi-separator", "|"]
    words = ["data", "prepare", str(events), *columns, "--items", str(films), *about]
    assert run_command([*words, "--out", str(folder / "data")]) == 0
    for name, schedule, epochs in (("early", "dual_buffer", 2), ("films", "nested", 8)):
        keys = (f"train.schedule={schedule}", f"epochs={epochs}", "evaluate_every=2", "log_every=3")
        run = train(folder, name, "tables.optimizer=rowwise_adagrad", *keys)
        assert run_command(["export", str(run), "--out", str(folder / f"{name}-bundle")]) == 0
    assert run_command(["evaluate", str(folder / "runs" / "films")]) == 0
    return folder


@pytest.fixture(scope="module")
def url(place: Path) -> Iterator[str]:
    """`slipstream ui` over both bundles and the runs."""
    targets = [str(place / "films-bundle"), str(place / "early-bundle"), str(place / "runs")]
    words = [sys.executable, "-u", "-m", "slipstream", "ui", *targets, "--port", "0"]
    process = subprocess.Popen(
        [*words, "--allow-kill", "--data", str(place / "data")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=place,
    )
    assert process.stdout is not None
    try:
        text = ""
        while "the page is at" not in text:
            line = process.stdout.readline()
            assert line, f"ui ended: {text}"
            text += line
        found = re.search(r"http://127\.0\.0\.1:\d+", text)
        assert found is not None and "260 of 260 people" in text
        yield found.group()
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture
def web(browser, url: str) -> Iterator[Watched]:
    """A fresh page; at its end nothing went wrong and nothing left the machine."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.set_default_timeout(LONG)
    watched = Watched(page, url)
    yield watched
    context.close()
    assert watched.errors == [] and watched.foreign == []


def await_behaviours(page: Any, count: int) -> None:
    """Wait until the history has so many behaviours."""
    rows = "document.querySelectorAll('ol.rows:not(.ranked) > li')"
    page.wait_for_function(f"count => {rows}.length === count", arg=count)


def ranked(web: Watched) -> list[str]:
    """The titles that are recommended, once the answer is there."""
    rows = web.page.locator("ol.ranked:not([aria-busy=true]) .name > span")
    rows.first.wait_for()
    return [text.replace("✓ came next", "").strip() for text in rows.all_inner_texts()]


def test_a_history_is_changed_and_the_answer_changes_with_it(web: Watched):
    web.open("?user=7")
    first = ranked(web)
    assert len(first) == 10
    history = web.page.get_by_role("list", name="History, newest first").get_by_role("listitem")
    known = history.count()
    web.page.get_by_role("button", name=f"Add {first[0]} to the history").click()
    web.page.wait_for_function(
        "title => document.querySelector('ol.rows .name span').innerText === title", arg=first[0]
    )
    assert history.count() == known + 1
    web.page.wait_for_function(
        "title => !document.querySelector('ol.ranked:not([aria-busy=true])')?.innerText"
        ".includes(title)",
        arg=first[0],
    )
    assert (
        ranked(web) != first and web.page.locator(".moved", has_text=re.compile("▲|▼|new")).count()
    )
    web.page.get_by_role("combobox", name="Add a title").fill("casabl")
    web.page.get_by_role("option", name="Casablanca").click()
    web.page.get_by_role("button", name="Drop Casablanca (1942)").click()
    web.page.get_by_role("button", name="undo changes").click()
    await_behaviours(web.page, known)
    assert ranked(web) == first
    slider = web.page.get_by_role("slider", name="as of")
    slider.focus()
    web.page.keyboard.press("ArrowLeft")
    await_behaviours(web.page, known - 1)
    assert f"at={known - 1}" in web.page.url


def test_an_address_can_be_shared_and_a_history_begun_from_nothing(web: Watched, browser):
    web.open("?start=empty")
    web.page.get_by_text("An empty history").wait_for()
    web.page.keyboard.press("/")
    web.page.keyboard.type("lion king")
    web.page.get_by_role("option", name="The Lion King").wait_for()
    web.page.keyboard.press("Enter")
    found = ranked(web)
    web.page.locator("ol.ranked > li").first.focus()
    web.page.keyboard.press("ArrowDown")
    web.page.keyboard.press("+")
    await_behaviours(web.page, 2)
    shared = browser.new_page()
    shared.goto(web.page.url)
    await_behaviours(shared, 2)
    kept = shared.locator("ol.rows:not(.ranked)").get_by_text(found[1])
    kept.first.wait_for()  # titles come after the behaviours
    assert kept.count() == 1
    shared.close()


def test_a_score_is_explained_and_neighbours_are_shown(web: Watched):
    web.open("?user=7")
    title = ranked(web)[0]
    web.page.get_by_role("button", name=f"Why {title}").click()
    effects = web.page.get_by_role("list", name=f"Effects on the score of {title}")
    effects.wait_for()
    numbers = effects.locator(".number").all_inner_texts()
    sizes = [abs(float(text.replace("−", "-"))) for text in numbers]
    assert len(sizes) >= 10 and sizes == sorted(sizes, reverse=True) and sizes[0] > 0
    assert web.findings() == []
    web.page.keyboard.press("Escape")
    web.page.locator("ol.ranked > li").first.focus()
    web.page.keyboard.press("n")
    neighbours = web.page.get_by_role("list", name="Neighbours").get_by_role("listitem")
    neighbours.first.wait_for()
    assert neighbours.count() == 10


def test_two_models_are_compared_and_the_request_is_quoted(web: Watched, tmp_path: Path):
    web.open("?user=7")
    ranked(web)
    web.page.get_by_label("compare with").select_option("early-bundle")
    web.page.get_by_role("heading", name="By early-bundle").wait_for()
    web.page.wait_for_function("() => document.querySelectorAll('ol.ranked > li').length === 20")
    shown = web.page.locator("ol.ranked").first.locator(".name > span").all_inner_texts()
    for button in ("Copy POST /v1/recommend as curl", "Copy POST /v1/recommend as Python"):
        web.page.get_by_role("button", name=button).click()
        text = web.page.evaluate("navigator.clipboard.readText()")
        words = shlex.split(text) if text.startswith("curl") else [sys.executable, "-c", text]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
        read = json.loads if text.startswith("curl") else ast.literal_eval
        answer = read(done.stdout)
        assert [each.split(" ✓")[0] for each in shown] == answer["titles"]


def test_runs_are_drawn_and_compared(web: Watched):
    web.open("?view=training")
    web.page.get_by_role("img", name=re.compile("^Loss, per supervised token")).wait_for()
    assert web.page.locator("figure.chart path.series").count() >= 4
    differences = web.page.locator(".panel", has_text="What differs in their recipes")
    assert "train.schedule" in differences.inner_text() and "nested" in differences.inner_text()
    web.page.get_by_role("checkbox", name="Show early").uncheck()
    web.page.wait_for_function("() => !document.body.innerText.includes('What differs')")
    assert "runs=films" in web.page.url


def test_the_lanes_of_two_schedules_stand_on_one_axis(web: Watched):
    web.open("?view=pipeline")
    web.page.locator("svg.lanes").nth(1).wait_for()
    block = web.page.locator("svg.lanes rect.kind-compute").first
    block.focus()
    detail = web.page.locator(".detail")
    assert "lane compute, step" in detail.inner_text()
    web.page.keyboard.press("ArrowRight")
    web.page.get_by_role("slider", name="steps").focus()
    web.page.keyboard.press("ArrowRight")
    web.page.wait_for_url("**steps=2**")
    web.page.locator("svg.lanes").nth(1).wait_for()


def test_the_sliders_ask_the_simulator(web: Watched):
    web.open("?view=scale")
    cell = web.page.get_by_role("row", name=re.compile("^nested")).locator("td").nth(1)
    cell.wait_for()
    before = cell.inner_text()
    web.page.get_by_role("slider", name="workers").focus()
    web.page.keyboard.press("ArrowRight")
    web.page.wait_for_function(
        "text => [...document.querySelectorAll('tr')].some(row =>"
        " row.innerText.startsWith('nested') && !row.innerText.includes(text))",
        arg=before,
    )
    assert "workers=128" in web.page.url and web.page.locator("svg.lanes").count() == 2
    assert "--workers 128" in web.page.locator(".command code").first.inner_text()


def test_an_instance_is_killed_and_seen_to_recover(web: Watched):
    web.open("?view=fleet")
    row = web.page.get_by_role("row", name=re.compile("^i-1"))
    row.get_by_text("ready").wait_for()
    row.get_by_role("button", name="kill").click()
    row.get_by_role("button", name="kill i-1?").click()
    told = web.page.locator(".panel", has_text="What happened here")
    told.get_by_text("i-1: killed").wait_for()
    told.get_by_text("i-1: started again").wait_for()
    row.get_by_text("ready").wait_for()
    assert row.get_by_role("button", name="kill").is_enabled()


def test_a_slice_leads_to_its_people_and_they_to_recommend(web: Watched):
    web.open("?view=slices")
    web.page.locator(".groups a").first.click()
    person = web.page.locator(".people a").first
    person.wait_for()
    name = person.inner_text()
    person.click()
    web.page.get_by_role("list", name="History, newest first").wait_for()
    assert f"user={name}" in web.page.url
    assert ranked(web)


@pytest.mark.parametrize(
    ("size", "scheme"),
    [
        ("wide", "light"),
        ("phone", "dark"),
        pytest.param("wide", "dark", marks=pytest.mark.slow),
        pytest.param("phone", "light", marks=pytest.mark.slow),
    ],
)
def test_every_view_fits_and_is_readable(browser, url: str, size: str, scheme: str):
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
    )
    page = context.new_page()
    page.set_default_timeout(LONG)
    web = Watched(page, url)
    for view in VIEWS:
        web.open(f"?view={view}&user=7")
        page.wait_for_function("() => !document.querySelector('.busy')")
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{view} is {wide} pixels wide on {width}"
        assert web.findings() == [], view
        pictured = (size, scheme) == ("wide", "light") or view == "recommend"
        if pictured and os.environ.get("SLIPSTREAM_PICTURES"):
            page.screenshot(path=ROOT / "docs" / "images" / f"{view}-{size}-{scheme}.png")
    context.close()
    assert web.errors == [] and web.foreign == []


def test_the_page_is_at_the_root_of_a_server_and_asks_for_its_key(browser, place: Path):
    from tests.support.serve_command import KEY, served

    with served(place / "films-bundle") as (address, _):
        with urllib.request.urlopen(address, timeout=20) as answer:
            assert "script-src 'self'" in answer.headers["content-security-policy"]
        page = browser.new_page()
        page.set_default_timeout(LONG)
        page.goto(f"{address}/?start=empty")
        page.get_by_label("API key").fill(KEY)
        page.get_by_role("button", name="Use this key").click()
        page.get_by_text("An empty history").wait_for()
        page.get_by_role("link", name="Fleet").click()
        page.get_by_role("row", name=re.compile("^i-0")).get_by_text("ready").wait_for()
        page.get_by_role("link", name="Training").click()
        page.get_by_text("No directory of runs is shown here").wait_for()
        assert KEY not in page.content() and KEY not in page.url
        assert page.evaluate("localStorage.length + sessionStorage.length") == 0
        page.close()
