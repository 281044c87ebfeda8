"""The files of the web page, in front of an app: `/` and `/ui/…`, read once and kept in memory.

They need no key: they hold nothing of the deployment, and the page asks for the key itself. The
headers let a browser run only what comes from here. Touch this when the page needs another type of
file or another right.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.errors import SlipstreamError
from slipstream.serving.http.http_app import header, send_answer

PREFIX = "/ui/"
MEDIA = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SAFE_HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),  # kept, but asked for again: an upgrade is seen at once
]


@dataclass(frozen=True)
class PageFile:
    """One file: its bytes, its media type, and a tag that changes with the bytes."""

    content: bytes
    media: bytes
    tag: bytes


def read_page(directory: Path) -> dict[str, PageFile]:
    """Read the files of a page by the path they are served at."""
    if not (directory / "index.html").is_file():
        raise SlipstreamError(
            f"{directory} holds no page (no index.html); install slipstream again"
        )
    found = {}
    for path in sorted(directory.rglob("*")):
        if path.suffix in MEDIA and path.is_file():
            content = path.read_bytes()
            tag = b'"' + hashlib.blake2b(content, digest_size=8).hexdigest().encode() + b'"'
            place = PREFIX + path.relative_to(directory).as_posix()
            found[place] = PageFile(content, MEDIA[path.suffix], tag)
    found["/"] = found.pop(f"{PREFIX}index.html")
    return found


class PageFiles:
    """Answers for the files of the page; every other request goes to the app behind."""

    def __init__(self, directory: Path, app: ASGIApp) -> None:
        self._files, self._app = read_page(directory), app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        file = self._files.get(scope["path"]) if scope["type"] == "http" else None
        if file is None or scope["method"] not in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        headers = [*SAFE_HEADERS, (b"content-type", file.media), (b"etag", file.tag)]
        if header(scope, b"if-none-match") == file.tag:
            await send_answer(send, 304, headers, b"")
        else:
            await send_answer(
                send, 200, headers, b"" if scope["method"] == "HEAD" else file.content
            )
