"""A run's config on its way to other processes, and an example."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, SecretStr

from etude.config.document import copied, dig, replace_at
from etude.config.load import parse_config
from etude.config.registry import NOUNS, SINGLE, components_in
from etude.config.schema import Config
from etude.config.slots import Slot, walk
from etude.core.errors import RequestError
from etude.core.example import Example
from etude.store.plain import plain


def shipped(config: Config) -> dict[str, Any]:
    """The config as JSON of which `received` makes the same one: every value as it is, secrets included.

    It goes to a process that was started for the run, over a connection that nobody else reads, and never to
    a disk. Raises RequestError for a workflow, an evaluator or a tool that only this program has.
    """
    data = config.model_dump(mode="json", fallback=str)
    components = dict(components_in(data))
    for path, slot, value in walk(config, Slot(Config)):
        if isinstance(value, SecretStr):
            replace_at(data, path, value.get_secret_value())
        elif path in components:
            replace_at(data, path, {"_type": value.type_name, **dig(data, path)})
            if _holds_object(value):
                _leave_out(data, path, components[path], value)
        del slot
    _double_dollars(data)
    for path, text in config._as_written.items():
        if "$" not in text and dig(data, path) is not None:
            replace_at(data, path, text)  # The import path of a type, which registers it there.
    return data


def received(data: dict[str, Any]) -> Config:
    """The config that `shipped` made `data` of. Raises ConfigError for what this process does not have."""
    return parse_config(copied(data))


def shipped_example(example: Example) -> Any:
    """The example as JSON; only its id where JSON does not keep all of it."""
    data = {"id": example.id, "inputs": dict(example.inputs), "expected": example.expected}
    try:
        kept = json.loads(json.dumps(plain(data)))
    except (TypeError, ValueError, RecursionError):
        return example.id
    return kept if _is_same(data, kept) else example.id


def _is_same(value: Any, kept: Any) -> bool:
    """Whether two values are equal, and of the same types all through."""
    if type(value) is not type(kept):
        return False
    if isinstance(value, dict):
        return value.keys() == kept.keys() and all(_is_same(value[key], kept[key]) for key in value)
    if isinstance(value, list):
        return len(value) == len(kept) and all(map(_is_same, value, kept))
    return bool(value == kept)


def _holds_object(component: BaseModel) -> bool:
    """Whether a component holds what a config file cannot name, such as a function of a program."""
    fields = type(component).model_fields
    return any(field.exclude and getattr(component, name) is not None for name, field in fields.items())


def _leave_out(data: dict[str, Any], path: tuple[str | int, ...], kind: Any, component: Any) -> None:
    if path in SINGLE and kind == "datasets":
        replace_at(data, path, None)  # The examples themselves are sent.
        return
    name = getattr(component, "name", path[-1])
    raise RequestError(
        f"the {NOUNS[kind]} '{name}' is an object of this program, which other processes cannot import; "
        "define it at the top of a module that they can, or leave out eval.general.isolation"
    )


def _double_dollars(data: Any) -> None:
    """Escape what would be read as a reference to the environment."""
    items = data.items() if isinstance(data, Mapping) else enumerate(data)
    for key, value in list(items):
        if isinstance(value, str) and "$" in value:
            data[key] = value.replace("$", "$$")
        elif isinstance(value, dict | list):
            _double_dollars(value)
