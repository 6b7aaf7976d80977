"""What the gateway takes and gives, as an OpenAPI document, and as a page for people."""

from __future__ import annotations

import json
from functools import cache
from html import escape
from typing import Any

from cluster.gateway.embeddings import EmbeddingsRequest
from cluster.gateway.wire import JSON, JSON_LINES, MSGPACK, EncodeOptions

ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "type": {"type": "string", "description": "A type of encoder/errors.py."},
                "message": {"type": "string", "description": "What came, what fits and what to do."},
                "code": {"type": "integer", "description": "The HTTP status."},
                "param": {"type": "null"},
            },
        }
    },
}
ITEM = {
    "type": "object",
    "properties": {
        "index": {"type": "integer", "description": "Place in the request."},
        "id": {"type": "string", "description": "As the request named it."},
        "status": {"type": "integer", "description": "This item's own HTTP status."},
        "error": ERROR["properties"]["error"],  # type: ignore[index]
        "dtype": {"enum": ["float32", "float16", "bfloat16"]},
        "shape": {"type": "array", "items": {"type": "integer"}, "description": "Tokens, width."},
        "data": {"description": "The tokens' bytes, little-endian rows (base64 in JSON), or lists of numbers."},
        "grids": {"type": "array", "description": "Frames, rows and columns of patches of each segment."},
        "graphs": {"type": "array", "items": {"type": "string"}, "description": "CUDA graphs it ran in."},
        "misses": {"type": "array", "items": {"type": "string"}, "description": "Why parts of it ran eagerly."},
        "timings_ms": {"type": "object", "additionalProperties": {"type": "number"}},
        "worker": {"type": "string"},
        "cached": {"type": "boolean", "description": "It cost no GPU time."},
        "note": {"type": "string", "description": "About the media, such as 'first of 12 frames'."},
    },
}
FAILURES = {
    400: "It cannot be understood.",
    401: "No token, or one that nobody gave out.",
    403: "This token may not do that, or the URL is not allowed.",
    404: "No such model.",
    413: "Too many bytes, items or pixels.",
    415: "A body of another kind.",
    422: "No image, or a damaged one; every item of the request, if it has several.",
    429: "Full, or this token asks too often. Retry-After says when to come back.",
    503: "Starting, draining, or no worker is up. Retry-After says when to come back.",
    504: "The deadline passed.",
}


@cache
def describe() -> dict[str, Any]:
    """The document."""
    options = EncodeOptions.model_json_schema()["properties"]
    sources = {
        "type": "array",
        "minItems": 1,
        "description": "Encoded images: binary in msgpack, base64 or data: URIs in JSON; or URLs; or maps with "
        "'data' or 'url' and an 'id'.",
        "items": {},
    }
    asked = {"type": "object", "required": ["items"], "properties": {"items": sources, **options}}
    form = {
        "type": "object",
        "properties": {"image": {"type": "array", "items": {"type": "string", "format": "binary"}}, **options},
    }
    answer = {
        "type": "object",
        "properties": {"v": {"const": 1}, "model": {"type": "string"}, "items": {"type": "array", "items": ITEM}},
    }
    encode = {
        "summary": "Encode images",
        "description": "One item an image. With 'stream' each item follows as it ends: msgpack objects end to end, or "
        "lines of JSON, and a last map with 'end'.",
        "requestBody": {
            "required": True,
            "content": {MSGPACK: _schema(asked), JSON: _schema(asked), "multipart/form-data": _schema(form)},
        },
        "responses": {
            "200": {
                "description": "Every item was encoded.",
                "content": {MSGPACK: _schema(answer), JSON: _schema(answer), JSON_LINES: _schema(ITEM)},
            },
            "207": {
                "description": "Items ended differently; each has its status.",
                "content": {MSGPACK: _schema(answer), JSON: _schema(answer)},
            },
            **_failures(),
        },
    }
    embeddings = {
        "summary": "One vector an image, as OpenAI's clients ask for it",
        "description": "The mean of an image's tokens; a pooled encoder has one, which then is it.",
        "requestBody": {"required": True, "content": {JSON: _schema(EmbeddingsRequest.model_json_schema())}},
        "responses": {"200": {"description": "A vector for each input, in order."}, **_failures()},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "encpool", "version": "1", "description": "Images in, embeddings out."},
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{"token": []}],
        "paths": {
            "/v1/encode": {"post": encode},
            "/v1/embeddings": {"post": embeddings},
            "/v1/models": {"get": _get("What is served.", 401, 403, 503)},
            "/v1/stats": {"get": _get("What the live page shows.", 401, 403)},
            "/health": {"get": _get("This process answers.", open_to_all=True)},
            "/ready": {"get": _get("A worker encoded something a short while ago.", 503, open_to_all=True)},
            "/metrics": {"get": _get("For Prometheus.", 401, 403)},
            "/openapi.json": {"get": _get("This document.", open_to_all=True)},
            "/docs": {"get": _get("This document for people.", open_to_all=True)},
            "/": {"get": _get("The live page.", open_to_all=True)},
        },
    }


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"schema": schema}


def _failures(*statuses: int) -> dict[str, Any]:
    return {
        str(status): {"description": FAILURES[status], "content": {JSON: _schema(ERROR)}}
        for status in statuses or FAILURES
    }


def _get(summary: str, *failures: int, open_to_all: bool = False) -> dict[str, Any]:
    route = {"summary": summary, "responses": {"200": {"description": summary}}}
    if failures:
        route["responses"] |= _failures(*failures)  # type: ignore[operator]
    return {**route, "security": []} if open_to_all else route


# --- for people ---

STYLE = """
:root { color-scheme: light dark; --ink: #1c2127; --soft: #5b6570; --line: #d8dde3; --paper: #fbfbfa; --box: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7ea; --soft: #98a2ad; --line: #333a42; --paper: #14171a; --box: #1b1f24; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 54rem; padding: 0 1rem; }
section { background: var(--box); border: 1px solid var(--line); border-radius: 8px; padding: 0 1.2rem 1rem;
  margin: 1rem 0; }
h2 code { font-size: 1.05rem; } h2 small { font-weight: 400; color: var(--soft); }
table { border-collapse: collapse; width: 100%; } td { border-top: 1px solid var(--line); padding: .3rem .8rem .3rem 0;
  vertical-align: top; } td:first-child { white-space: nowrap; } p, td + td { color: var(--soft); }
h3 { margin: 1rem 0 .3rem; }
"""


@cache
def docs_page() -> str:
    """The document as a page."""
    parts = []
    for path, methods in describe()["paths"].items():
        for method, route in methods.items():
            parts.append(_section(method, path, route))
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>encpool: what the gateway takes</title>"
        f"<meta name='viewport' content='width=device-width'><style>{STYLE}</style>"
        f"<h1>encpool</h1><p>Images in, embeddings out. For machines: <a href='/openapi.json'>openapi.json</a>. "
        f"What it does now: <a href='/'>the live page</a>.</p>{''.join(parts)}</html>"
    )


def _section(method: str, path: str, route: dict[str, Any]) -> str:
    text = f"<section><h2><code>{method.upper()} {path}</code> <small>{escape(route['summary'])}</small></h2>"
    if "description" in route:
        text += f"<p>{escape(route['description'])}</p>"
    content = route.get("requestBody", {}).get("content", {})
    if content:
        kinds = ", ".join(f"<code>{kind}</code>" for kind in content)
        fields = content[JSON]["schema"]["properties"]
        rows = "".join(_row(name, _about(field)) for name, field in fields.items())
        text += f"<h3>Request</h3><p>{kinds}</p><table>{rows}</table>"
    rows = "".join(_row(status, answer["description"]) for status, answer in route["responses"].items())
    return f"{text}<h3>Answer</h3><table>{rows}</table></section>"


def _row(name: str, about: str) -> str:
    return f"<tr><td><code>{escape(name)}</code></td><td>{escape(about)}</td></tr>"


def _about(field: dict[str, Any]) -> str:
    about = str(field.get("description", ""))
    if "enum" in field:
        about += f" One of {', '.join(map(str, field['enum']))}."
    if field.get("default") is not None:
        about += f" Default: {json.dumps(field['default'])}."
    return about.strip()
