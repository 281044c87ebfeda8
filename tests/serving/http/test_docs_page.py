"""The page lists every endpoint with a command, and asks nothing of the network."""

import re
from html import unescape
from typing import Any

import pytest

from slipstream.serving.http.docs_page import PAGE_POLICY, docs_page, example_command
from slipstream.serving.http.endpoints import ENDPOINTS, openapi


@pytest.mark.parametrize("role", ["instance", "router"])
def test_every_endpoint_has_its_section_and_its_command(role: Any):
    document = openapi(role)
    page = unescape(docs_page(document).decode())
    for endpoint in (each for each in ENDPOINTS if role in each.roles):
        operation = document["paths"][endpoint.path][endpoint.method.lower()]
        command = example_command(endpoint.method, endpoint.path, operation)
        assert f'id="{endpoint.name}"' in page and command in page
        assert endpoint.summary in page
        assert endpoint.request is None or "--json '{" in command
    assert "most_per" in page and "By item feature: how many items may share a label." in page


def test_nothing_is_loaded_and_nothing_runs():
    page = docs_page(openapi("router")).decode()
    assert not re.findall(r"<script|<link|<img|@import|url\(|https?://", page)
    assert PAGE_POLICY.startswith("default-src 'none'")


def test_text_of_the_document_stays_text():
    document = openapi("router")
    document["info"]["title"] = "<b>&"
    assert b"<h1>&lt;b&gt;&amp;" in docs_page(document)
