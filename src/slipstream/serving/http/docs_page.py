"""The OpenAPI document as a page to read: plain HTML, without scripts and without the network.

Touch this when the page should show something else; what it shows comes from endpoints.py.
"""

import json
from html import escape
from typing import Any

PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h2 { margin: 2.5rem 0 .3rem; font-size: 1.1rem } h2 code { font-size: 1rem }
pre { background: #f4f4f2; padding: .7rem; overflow-x: auto; border-radius: 4px }
table { border-collapse: collapse; width: 100% } details { margin: .4rem 0 }
td, th { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0 }
tr + tr td { border-top: 1px solid #ddd }
@media (prefers-color-scheme: dark) {
  body { background: #161616; color: #ddd } pre { background: #242424 } a { color: #8ab4f8 }
  tr + tr td { border-color: #444 } }
"""


def docs_page(document: dict[str, Any]) -> bytes:
    """Return the page of an OpenAPI document."""
    info, schemas = document["info"], document["components"]["schemas"]
    operations = [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    links = "".join(
        f'<li><a href="#{op["operationId"]}"><code>{method} {escape(path)}</code></a> '
        f"{escape(op['summary'])}</li>"
        for method, path, op in operations
    )
    sections = "".join(_section(*each, schemas) for each in operations)
    title = f"{escape(info['title'])} {escape(info['version'])}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        f"<h1>{title}</h1><p>{escape(info['description'])} The same as a document for programs: "
        '<a href="openapi.json"><code>/openapi.json</code></a>. With API keys, every request but '
        "those for health carries one in <code>x-api-key</code>.</p>"
        f"<ul>{links}</ul>{sections}</body></html>"
    ).encode()


def _section(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    """Return what the page says of one endpoint."""
    parts = [
        f'<h2 id="{operation["operationId"]}"><code>{method} {escape(path)}</code></h2>',
        f"<p>{escape(operation['summary'])}</p>",
        f"<pre>{escape(example_command(method, path, operation))}</pre>",
    ]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if body is not None:
        parts.append(_fields("Request", body["schema"], schemas))
    for status, response in operation["responses"].items():
        content = response["content"]
        schema = content.get("application/json", {}).get("schema")
        if status.startswith("2") and schema is not None:
            parts.append(_fields(f"Answer ({status})", schema, schemas))
    refused = {
        status: response["description"]
        for status, response in operation["responses"].items()
        if not status.startswith("2")
    }
    if refused:
        rows = "".join(
            f"<tr><td>{s}</td><td>{escape(text)}</td></tr>" for s, text in refused.items()
        )
        parts.append(f"<details><summary>Refusals</summary><table>{rows}</table></details>")
    return "".join(parts)


def example_command(method: str, path: str, operation: dict[str, Any]) -> str:
    """Return a command that sends an example of a request."""
    url = f"localhost:8000{path.replace('{user}', 'ann')}"
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    if "example" in body:
        return f"curl -s {url} --json '{json.dumps(body['example'])}'"
    return f"curl -s {url}" if method == "GET" else f"curl -s -X {method} {url}"


def _fields(title: str, schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    """Return the fields of a message; those of messages inside it follow."""
    name = schema.get("$ref", "").rpartition("/")[2]
    if name not in schemas:
        return ""
    described = schemas[name]
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code></td><td>{escape(_kind(about))}</td>"
        f"<td>{escape(_about(about))}</td></tr>"
        for field, about in described.get("properties", {}).items()
    )
    text = escape(described.get("description", ""))
    return (
        f"<details><summary>{title}: {escape(name)}</summary><p>{text}</p><table>{rows}</table>"
        "</details>"
    )


def _kind(schema: dict[str, Any]) -> str:
    """Return the type of a value in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(each) for each in schema["anyOf"]))
    kind = str(schema.get("type", "value"))
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"{_kind(schema['additionalProperties'])} by name"
    return kind


def _about(schema: dict[str, Any]) -> str:
    """Return the description of a value, with its default."""
    parts = [schema, *schema.get("anyOf", [])]
    text = next((part["description"] for part in parts if "description" in part), "")
    default = schema.get("default")
    return f"{text} Default: {json.dumps(default)}." if default not in (None, [], {}) else text
