"""`/docs`: all routes of the server on one page, which needs no script and nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup
from starlette.responses import HTMLResponse

_HERE = Path(__file__).parent
_POLICY = "default-src 'none'; style-src 'sha256-{}'; base-uri 'none'; frame-ancestors 'none'"


def docs_page(schema: Mapping[str, Any]) -> HTMLResponse:
    """The page of an OpenAPI schema."""
    about = schema["info"]
    page, style = ((_HERE / f"docs_page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css"))
    template = Environment(autoescape=True).from_string(page)
    text = template.render(
        title=about["title"],
        version=about["version"],
        about=about.get("description", ""),
        style=Markup(style),
        tags=_by_tag(schema),
    )
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return HTMLResponse(text, headers={"content-security-policy": _POLICY.format(digest)})


def _by_tag(schema: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    tags: dict[str, list[dict[str, Any]]] = {}
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            entry = {
                "id": route["operationId"],
                "method": method.upper(),
                "path": path,
                "summary": route.get("summary", ""),
                "about": route.get("description", ""),
                "fields": [*_fields(route, schema)],
            }
            tags.setdefault((route.get("tags") or ["other"])[0], []).append(entry)
    return tags


def _fields(route: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """The parameters of a route, and the fields of its body."""
    for each in route.get("parameters", ()):
        yield _field(each["name"], each.get("schema", {}), f"{each['in']}. {each.get('description', '')}")
    for content in route.get("requestBody", {}).get("content", {}).values():
        body = _resolved(content.get("schema", {}), schema)
        required = body.get("required", ())
        for name, inner in body.get("properties", {}).items():
            about = str(inner.get("description", ""))
            yield _field(name, inner, f"Required. {about}" if name in required else about)


def _field(name: str, schema: Mapping[str, Any], about: str) -> dict[str, str]:
    kinds = [_kind(each) for each in schema.get("anyOf", ())] or [_kind(schema)]
    return {"name": name, "kind": " or ".join(dict.fromkeys(filter(None, kinds))), "about": about}


def _kind(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    return ", ".join(map(str, schema["enum"])) if "enum" in schema else str(schema.get("type", ""))


def _resolved(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> Mapping[str, Any]:
    if "$ref" not in schema:
        return schema
    resolved: Mapping[str, Any] = whole["components"]["schemas"][str(schema["$ref"]).rpartition("/")[2]]
    return resolved
