"""The files of a page are served as they are, with headers that let nothing else run."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import SlipstreamError
from slipstream.serving.http.page_files import PageFiles, read_page


async def behind(scope: Any, receive: Any, send: Any) -> None:
    """The app behind the page."""
    await send({"type": "http.response.start", "status": 418, "headers": []})
    await send({"type": "http.response.body", "body": b"behind"})


def ask(
    page: PageFiles, path: str, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": pairs}
    asyncio.run(page(scope, None, send))  # type: ignore[arg-type]
    told = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], told, sent[1]["body"]


@pytest.fixture
def page(tmp_path: Path) -> PageFiles:
    (tmp_path / "views").mkdir()
    (tmp_path / "index.html").write_text("<p>é</p>", encoding="utf-8")
    (tmp_path / "views" / "one.js").write_text("export default 1;")
    (tmp_path / "notes.txt").write_text("not for a browser")
    (tmp_path.parent / "secret.js").write_text("secret")
    return PageFiles(tmp_path, behind)


def test_files_are_served_by_type_and_anything_else_goes_to_the_app_behind(page: PageFiles):
    assert ask(page, "/")[::2] == (200, "<p>é</p>".encode())
    status, headers, body = ask(page, "/ui/views/one.js")
    assert (status, headers["content-type"], body) == (
        200,
        "text/javascript; charset=utf-8",
        b"export default 1;",
    )
    for path in ("/ui/notes.txt", "/ui/", "/ui/index.html", "/ui/../secret.js", "/ui/no.js"):
        assert ask(page, path)[::2] == (418, b"behind")
    assert ask(page, "/", "POST")[0] == 418
    assert ask(page, "/", "HEAD")[::2] == (200, b"")


def test_only_what_comes_from_here_may_run(page: PageFiles):
    policy = ask(page, "/")[1]["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'" and rules["script-src"] == "'self'"
    assert "unsafe" not in policy and not re.search(r"https?:|\*", policy)
    assert ask(page, "/")[1]["x-content-type-options"] == "nosniff"


def test_an_unchanged_file_is_not_sent_twice(page: PageFiles):
    tag = ask(page, "/")[1]["etag"]
    assert ask(page, "/", if_none_match=tag)[::2] == (304, b"")
    assert ask(page, "/", if_none_match='"another"')[0] == 200


def test_a_directory_without_a_page_is_refused(tmp_path: Path):
    with pytest.raises(SlipstreamError, match=r"holds no page"):
        read_page(tmp_path)
