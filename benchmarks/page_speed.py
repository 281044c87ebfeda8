"""How soon the page paints, answers a click and explains a score, in the system's Chromium.

`slipstream serve` with two instances and a little load, driven as a person would. The protocol is
in protocols/page_speed.md. Touch this when another interaction is timed.
"""

import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.command import run_measurement
from benchmarks.kv_precision import train_bundle
from benchmarks.large_catalogue import run_words
from benchmarks.served import Connection, served
from slipstream.bench import harness
from slipstream.data.store import SequenceStore
from slipstream.errors import SlipstreamError

STEPS, LOAD_SECONDS = 60, 0.2  # training steps; between two requests of the load
PAINTS, PEOPLE, EXPLAINED = 10, 7, 20
QUICK_PAINTS, QUICK_PEOPLE, QUICK_EXPLAINED = 2, 1, 2
LEAST, BEHAVIOURS = 100, 200  # of people who are clicked for; explained
WAIT_MS = 60_000  # only ends a benchmark that hangs
NOT_BUSY = "document.querySelector('ol.ranked:not([aria-busy=true]) > li')"
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
# Acts, then waits for a frame with the answer of a request that began after it.
TIMED = """async (act) => {
  const asked = () => performance.getEntriesByType("resource").filter((each) => each.name.includes("/v1/recommend")).length;
  const before = asked(), begin = performance.now();
  if (act === "add") document.querySelector("ol.ranked button[aria-label^='Add ']").click();
  if (act === "drop") document.querySelector("ol.rows:not(.ranked) button[aria-label^='Drop ']").click();
  if (act === "back") {
    const slider = document.querySelector("input[type=range]");
    slider.value = Number(slider.value) - 1;
    slider.dispatchEvent(new Event("input", { bubbles: true }));
    slider.dispatchEvent(new Event("change", { bubbles: true }));
  }
  while (asked() === before || !document.querySelector("ol.ranked:not([aria-busy=true]) > li")) {
    if (performance.now() - begin > 30000) throw new Error(`no answer to ${act}`);
    await new Promise(requestAnimationFrame);
  }
  return performance.now() - begin;
}"""  # noqa: E501


@contextlib.contextmanager
def load_of(url: str, users: list[str]) -> Iterator[None]:
    """Ask for recommendations of users, over and over, while the block runs."""
    ended = threading.Event()

    def ask() -> None:
        connection, number = Connection(url), 0
        while not ended.wait(LOAD_SECONDS):
            asked = {"user": users[number % len(users)], "count": 10}
            connection.post("/v1/recommend", msgspec.json.encode(asked))
            number += 1
        connection.close()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(60)


def measure_page(url: str, people: list[str], paints: int) -> tuple[list[float], list[float]]:
    """Return milliseconds of first paints and of interactions."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SlipstreamError("the page is timed in Chromium; install it: apt-get install chromium")
    painted, answered, errors = [], [], list[str]()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )

        def note_error(message: Any) -> None:
            if message.type == "error":
                errors.append(message.text)

        def open_page(user: str) -> Any:
            context = browser.new_context(viewport={"width": 1440, "height": 900})
            page = context.new_page()
            page.set_default_timeout(WAIT_MS)
            page.on("console", note_error)
            page.on("pageerror", lambda each: errors.append(str(each)))
            page.goto(f"{url}/?user={user}")
            page.wait_for_function(f"() => {NOT_BUSY}")
            return page

        for number in range(paints):
            page = open_page(people[number % len(people)])
            page.wait_for_function(f"() => {PAINT}")
            painted.append(float(page.evaluate(PAINT)))
            page.context.close()
        for user in people:
            page = open_page(user)
            for act in ("add", "drop", "back"):
                time.sleep(0.3)
                answered.append(float(page.evaluate(TIMED, act)))
            page.context.close()
        browser.close()
    if errors:
        raise SlipstreamError(f"the page reported an error: {errors[0][:300]}")
    return painted, answered


def measure_explanations(url: str, users: list[str]) -> list[float]:
    """Return milliseconds of exact explanations over all of 200 behaviours."""
    connection, found = Connection(url), []
    for user in users:
        asked = {"user": user, "count": 1}
        answer = msgspec.json.decode(connection.post("/v1/recommend", msgspec.json.encode(asked)))
        body = {"user": user, "item": answer["items"][0], "behaviours": BEHAVIOURS}
        begin = time.perf_counter()
        told = msgspec.json.decode(connection.post("/v1/explain", msgspec.json.encode(body)))
        found.append(1e3 * (time.perf_counter() - begin))
        if len(told["without"]) != BEHAVIOURS:
            raise SlipstreamError(
                f"{len(told['without'])} of {BEHAVIOURS} behaviours were left out"
            )
    connection.close()
    return found


def run(quick: bool = False, json_path: Path | None = None) -> dict[str, Any]:
    """Measure, print a table, write the JSON if a path is given."""
    paints, most, explained = (
        (QUICK_PAINTS, QUICK_PEOPLE, QUICK_EXPLAINED) if quick else (PAINTS, PEOPLE, EXPLAINED)
    )
    with tempfile.TemporaryDirectory(prefix="slipstream-page-") as folder:
        place = Path(folder)
        harness.note("a synthetic log, a model, and `slipstream serve`")
        size = ("--users", "2000", "--items", "4000")
        run_words(place, "data", "prepare", "synthetic", *size, "--out", "store")
        bundle = train_bundle(place, "retrieval", STEPS)
        run_words(place, "history", "import", "store", "--history", "sqlite:history.db")
        store = SequenceStore.open(place / "store")
        long_enough = [
            [str(store.users.id(int(row))) for row in np.flatnonzero(store.lengths_U >= least)]
            for least in (LEAST, BEHAVIOURS)
        ]
        people, historians = long_enough[0][:most], long_enough[1][:explained]
        options = ("--instances", "2", "--history", f"sqlite:{place / 'history.db'}")
        with served(bundle, *options, processes=3) as url, load_of(url, long_enough[0][-200:]):
            harness.note("the page in Chromium")
            painted, answered = measure_page(url, people, paints)
            harness.note("explanations")
            explanations = measure_explanations(url, historians)
    taken = {"first paint": painted, "interaction": answered, "explanation": explanations}
    rows = [
        {
            "variant": name,
            "ms": harness.median(times),
            "largest ms": max(times),
            "spread": harness.spread(times),
            "samples": times,
        }
        for name, times in taken.items()
    ]
    claims = {
        "first_paint_ms": harness.median(painted),
        "interaction_ms": harness.median(answered),
        "interaction_ms_max": max(answered),
        "explain_ms_200": harness.median(explanations),
        "explain_ms_200_max": max(explanations),
    }
    return harness.finish("page_speed", rows, claims, json_path)


if __name__ == "__main__":
    run_measurement(run, __doc__)
