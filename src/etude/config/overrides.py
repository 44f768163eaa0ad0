"""Overrides from the command line: `-o finetuning.num_epochs=5`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import yaml

from etude.config.document import Document, KeyPath, copied, dig
from etude.config.yaml_file import parse_value
from etude.core.errors import RequestError

Override: TypeAlias = str | tuple[str, str]
"""`a.b.c=value`, or the key and the value apart."""

_FLAGS = ("-o", "--override")


def join_words(arguments: Sequence[str]) -> list[str]:
    """Command-line arguments with the two-word form `-o a.b.c value` written as `-o a.b.c=value`."""
    joined: list[str] = []
    words = iter(arguments)
    for word in words:
        joined.append(word)
        if word in _FLAGS and (key := next(words, None)) is not None:
            value = None if "=" in key else next(words, None)
            joined.append(key if value is None else f"{key}={value}")
    return joined


def apply_overrides(document: Document, overrides: Iterable[Override]) -> Document:
    """The document with each override set, in order. Values are YAML.

    Whether a key exists is checked where the keys of the file are. Raises RequestError when an
    override has no value, or one that is not YAML.
    """
    data = copied(document.data)
    paths = [_set(data, *_parse(override)) for override in overrides]
    return document.with_data(data, paths)


def _parse(override: Override) -> tuple[list[str], Any]:
    key, equals, text = (
        override.partition("=") if isinstance(override, str) else (override[0], "=", override[1])
    )
    if not equals or not all(key.split(".")):
        raise RequestError(f"-o {key}: an override is written key.of.the.config=value")
    try:
        return key.split("."), parse_value(text)
    except yaml.YAMLError:
        raise RequestError(f"-o {key}: the value {text!r} is not valid YAML; put it in quotes") from None


def _set(data: dict[str, Any], keys: Sequence[str], value: Any) -> KeyPath:
    """Put `value` in its place, making mappings on the way; the path in the data's own keys."""
    node: Any = data
    path: list[str | int] = []
    for name in keys:
        if path:
            node = _enter(node, path[-1])
        key: str | int = name
        if isinstance(node, list):
            if not name.isdecimal() or int(name) >= len(node):
                where = ".".join(keys)
                raise RequestError(
                    f"-o {where}: '{name}' is no position in a list of {len(node)}; count from 0"
                )
            key = int(name)
        path.append(key)
    node[path[-1]] = value
    return tuple(path)


def _enter(node: Any, key: Any) -> Any:
    below = dig(node, (key,))
    if not isinstance(below, dict | list):
        # A component may be written as its type alone: `workflow: my_agent:play`.
        node[key] = {"_type": below} if isinstance(below, str) else {}
    return node[key]
