"""The OpenAPI schema of the application, and the same as a page that needs nothing from anywhere."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from mindspeed_asyncflow.web import wire
from mindspeed_asyncflow.web.calls import described

_REF = "#/components/schemas/{model}"
_STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
code,pre{font-family:ui-monospace,monospace}pre{overflow:auto;padding:.7rem;border:1px solid #8886}
table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #8886;padding:.3rem;text-align:left;
vertical-align:top}@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}}"""
_STATUSES = {
    "400": "the body or a value is not as it must be",
    "401": "no token, or an unknown one",
    "403": "not a program of this machine",
    "404": "no such thing, or it is not yours",
    "408": "not in time",
    "409": "not in this state of the run",
    "413": "too large",
    "415": "no content type of this call",
    "422": "what it says does not fit the run",
    "429": "too much at once",
    "431": "too many headers",
    "503": "not now: the engines start, recover, or have enough",
    "504": "not in time",
    "507": "no room for rows",
}


def complete_schema(app: FastAPI) -> dict[str, Any]:
    """With the bodies that endpoints read themselves, and how errors look."""
    schema = app.openapi()
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            _describe_answers(operation, path)
    parts = schema.setdefault("components", {})
    _, definitions = models_json_schema([(m, "validation") for m in described.values()], ref_template=_REF)
    parts["schemas"] = definitions.get("$defs", {}) | {
        "Error": {
            "type": "object",
            "required": ["error"],
            "properties": {
                "error": {
                    "type": "object",
                    "required": ["code", "message"],
                    "properties": {"code": {"type": "string"}, "message": {"type": "string"}},
                }
            },
        }
    }
    parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    schema["security"] = [{"token": []}]
    return json.loads(json.dumps(schema))


def _describe_answers(operation: dict[str, Any], path: str) -> None:
    streams = path.endswith(("/init_engines", "/metrics"))
    told: dict[str, Any] = {"type": "object"}
    content = {wire.LINES: {}} if streams else {wire.JSON: {"schema": told}}
    if path.endswith("/get_experience_data"):
        content[wire.TENSORS] = {"schema": {"type": "string", "format": "binary"}}
    error = {wire.JSON: {"schema": {"$ref": _REF.format(model="Error")}}}
    if path.startswith("/api/"):
        operation["responses"] = {"200": {"description": "done", "content": content}}
    operation["responses"].pop("422", None)
    operation["responses"] |= {status: {"description": words, "content": error} for status, words in _STATUSES.items()}


def page(schema: dict[str, Any]) -> str:
    """One HTML page: every call with its fields."""
    info = schema["info"]
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(info['title'])}</title>",
        f"<style>{_STYLE}</style><h1>{escape(info['title'])} {escape(info['version'])}</h1>",
        *(f"<p>{escape(text)}</p>" for text in info["description"].split("\n\n")),
        "<p>For programs: <a href=openapi.json>openapi.json</a></p>",
    ]
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}</p>")
            body = operation.get("requestBody", {}).get("content", {}).get(wire.JSON, {}).get("schema", {})
            if "$ref" in body:
                parts.append(_fields(schema, body["$ref"].rpartition("/")[2]))
            for parameter in operation.get("parameters", ()):
                parts.append(f"<p>query <code>{escape(parameter['name'])}</code></p>")
    named = [name for name in schema["components"]["schemas"] if name != "Error"]
    parts.append("<h1>Objects</h1>")
    parts += [f"<h2 id={escape(name)}><code>{escape(name)}</code></h2>{_fields(schema, name)}" for name in named]
    return "\n".join(parts) + "</html>"


def _fields(schema: dict[str, Any], name: str) -> str:
    model = schema["components"]["schemas"][name]
    rows = []
    for field, told in model.get("properties", {}).items():
        needed = "" if field in model.get("required", ()) else f"default {json.dumps(told.get('default'))}"
        rows.append(
            f"<tr><td><code>{escape(field)}</code><td>{_kind(told)}<td>{escape(needed)}"
            f"<td>{escape(told.get('description', ''))}"
        )
    return f"<p>{escape(model.get('description', ''))}</p><table>{''.join(rows)}</table>"


def _kind(told: dict[str, Any]) -> str:
    if "$ref" in told:
        name = told["$ref"].rpartition("/")[2]
        return f"<a href=#{escape(name)}>{escape(name)}</a>"
    if "anyOf" in told:
        return " or ".join(dict.fromkeys(_kind(part) for part in told["anyOf"]))
    if told.get("type") == "array":
        return f"list of {_kind(told.get('items', {}))}"
    return escape(told.get("type", "any"))
