"""A hook of mkdocs: links that lead out of the manual become the paths they name.

On the project's host such links work; a site of the manual alone has no such files. Touch this when
pages link to something else outside.
"""

import re
from pathlib import PurePosixPath
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#:]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_more: Any) -> str:
    """Replace each link out of the manual by its text and path."""
    folder = PurePosixPath(page.file.src_uri).parent

    def replace(found: re.Match[str]) -> str:
        parts: list[str] = list(folder.parts)
        for part in found[2].split("/"):
            if part == "..":
                if not parts:
                    path = found[2].replace("../", "")
                    return found[1] if path in found[1] else f"{found[1]} (`{path}`)"
                parts.pop()
            else:
                parts.append(part)
        return found[0]

    return LINK.sub(replace, markdown)
