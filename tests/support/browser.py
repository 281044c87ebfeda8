"""The system's Chromium, driven by Playwright: every console error and foreign request is kept."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
LIBRARIES = ("playwright", "axe_playwright_python")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or not all(map(find_spec, LIBRARIES)),
    reason="chromium (apt-get install chromium), playwright or axe-playwright-python is missing",
)
SERIOUS = ("serious", "critical")


class Watched:
    """A page with what went wrong on it."""

    def __init__(self, page: Any, url: str) -> None:
        self.page, self.url = page, url
        self.errors: list[str] = []
        self.foreign: list[str] = []
        page.on("console", lambda each: each.type == "error" and self.errors.append(each.text))
        page.on("pageerror", lambda each: self.errors.append(str(each)))
        page.on("request", lambda each: self._note(each.url))

    def _note(self, url: str) -> None:
        if urlsplit(url).netloc != urlsplit(self.url).netloc and not url.startswith("data:"):
            self.foreign.append(url)

    def open(self, query: str) -> None:
        """Go to a view and wait until it has loaded."""
        self.page.goto(f"{self.url}/{query}")
        self.page.wait_for_selector("main .panel, main .empty, main .controls")

    def findings(self) -> list[str]:
        """What axe finds serious on what is shown now."""
        import axe_playwright_python

        script = Path(axe_playwright_python.__file__).with_name("axe.min.js").read_text()
        self.page.evaluate(script)
        found = self.page.evaluate("axe.run()")
        return [
            f"{each['id']}: {each['help']} ({each['nodes'][0]['html'][:160]})"
            for each in found["violations"]
            if each["impact"] in SERIOUS
        ]


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser of its own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        try:
            yield browser
        finally:
            browser.close()
