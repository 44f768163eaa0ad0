"""The short ways to write a component, spelled out.

`workflow: my_agent:play` is `{_type: function, function: "my_agent:play"}`, and
`dataset: data/train.jsonl` is `{_type: jsonl, file_path: data/train.jsonl}`; both may also stand as
the `_type` of a mapping with more keys.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from etude.config import registry
from etude.config.describe import shown
from etude.config.import_path import import_object, is_import_path
from etude.config.registry import NOUNS, Kind
from etude.core.errors import RequestError

FILE_TYPES = {".json": "json", ".jsonl": "jsonl", ".csv": "csv", ".parquet": "parquet"}
"""Dataset types by the suffix of the file."""

FUNCTION_TYPES: dict[Kind, str] = {"workflow": "function", "evaluators": "function", "datasets": "python"}
"""The types that take a plain Python function, under the key `function`."""


def spell_out(kind: Kind, value: Any) -> dict[str, Any]:
    """A component as a mapping whose `_type` is a registered name, as far as there is one.

    Imports what import paths name. Raises RequestError when that fails, for a file whose format is
    not known by its suffix, and for a value that cannot be a component.
    """
    if not isinstance(value, str | dict):
        raise RequestError(f"expected a mapping with `_type`, or the type alone, found {shown(value)}")
    keys = dict(value) if isinstance(value, dict) else {"_type": value}
    if "_type" not in keys:
        keys["_type"] = _type_by_keys(kind, keys)
    written = keys["_type"]
    if isinstance(written, str) and is_import_path(written):
        return _imported(kind, written, keys)
    if isinstance(written, str) and kind == "datasets" and ("." in written or "/" in written):
        return keys | {"_type": _file_type(written), "file_path": written}
    if isinstance(function := keys.get("function"), str) and written == FUNCTION_TYPES.get(kind):
        import_object(function)
    return keys


def _type_by_keys(kind: Kind, keys: dict[str, Any]) -> str | None:
    """The type of a mapping that does not say it, where its keys do."""
    if kind in FUNCTION_TYPES and "function" in keys:
        return FUNCTION_TYPES[kind]
    if kind == "datasets" and isinstance(keys.get("file_path"), str):
        return _file_type(keys["file_path"])
    return None


def _imported(kind: Kind, path: str, keys: dict[str, Any]) -> dict[str, Any]:
    registration = registry.of_object(kind, import_object(path))
    if registration is not None:
        return keys | {"_type": registration.name}
    if kind in FUNCTION_TYPES:
        return keys | {"_type": FUNCTION_TYPES[kind], "function": path}
    raise RequestError(
        f"'{path}' is not registered as {NOUNS[kind]}: it needs one of the decorators etude.register_…"
    )


def _file_type(file: str) -> str:
    suffix = PurePath(file).suffix.lower()
    if suffix not in FILE_TYPES:
        allowed = ", ".join(FILE_TYPES)
        raise RequestError(f"the suffix of '{file}' does not tell what format it has. Allowed: {allowed}")
    return FILE_TYPES[suffix]
