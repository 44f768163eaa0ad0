"""YAML with positions: files to documents, values to text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from etude.config.document import Document, KeyPath, dotted
from etude.config.nearest import nearest
from etude.core.errors import ConfigError

_HINTS = {
    "expected ',' or '}', but got '{'": "put a value that holds '${' in quotes",
    "mapping values are not allowed here": "check the indentation, or put a value that holds ': ' in quotes",
    "could not find expected ':'": "each key needs a ':' and a space after it",
    "found character '\\t' that cannot start any token": "YAML is indented with spaces, not with tabs",
    "expected a single document in the stream": "keep one document; remove the line '---'",
}


class _Loader(yaml.SafeLoader):
    """YAML as `yaml.safe_load` reads it, but `1e-5` is a number."""


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads back as the same value."""


for _dialect in (_Loader, _Dumper):
    _dialect.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
        list("-+.0123456789"),
    )


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # PyYAML writes the line breaks of other alphabets as they are, and reads them back as spaces.
    style = '"' if any(mark in text for mark in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def read_document(path: Path) -> Document:
    """Read a YAML file. Raises ConfigError when it is missing, is not YAML, or holds no mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {path}{_nearest_file(path)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"not a text file in UTF-8: {error.reason}", path=path) from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", path=path) from None
    return parse_document(text, path)


def parse_document(text: str, path: Path) -> Document:
    """The document that `text` spells; `path` is named in errors. Raises ConfigError."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            raise ConfigError("the file is empty; `etude init` writes a config to start from", path=path)
        _refuse_duplicates(node, (), path, set())
        data = loader.construct_document(node)
        marks = {(): (1, 1), **dict(_marks(node, loader))}
    except yaml.MarkedYAMLError as error:
        raise _not_yaml(error, path) from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"not valid YAML: {error}", path=path) from None
    finally:
        loader.dispose()
    if not isinstance(data, dict):
        kind = "a list" if isinstance(data, list) else f"'{data}'"
        raise ConfigError(f"expected a mapping of keys to values, found {kind}", path=path, line=1, column=1)
    return Document(data, path, marks)


def parse_value(text: str) -> Any:
    """The value that a piece of YAML spells. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - a subclass of SafeLoader


def dump(data: Any) -> str:
    """YAML text that reads back as `data`."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _refuse_duplicates(node: yaml.Node, path: KeyPath, file: Path, visited: set[int]) -> None:
    if id(node) in visited or not isinstance(node, yaml.CollectionNode):
        return
    visited.add(id(node))
    lines: dict[str, int] = {}
    for index, item in enumerate(node.value):
        key, value = item if isinstance(node, yaml.MappingNode) else (None, item)
        name = key.value if isinstance(key, yaml.ScalarNode) else index
        if key is not None and isinstance(name, str) and name != "<<":
            line, column = _position(key)
            if name in lines:
                message = (
                    f"key '{dotted((*path, name))}' is given twice, first in line {lines[name]}; keep one"
                )
                raise ConfigError(message, path=file, line=line, column=column)
            lines[name] = line
        _refuse_duplicates(value, (*path, name), file, visited)


def _marks(
    node: yaml.Node, keys: _Loader, path: KeyPath = (), above: tuple[int, ...] = ()
) -> Iterator[tuple[KeyPath, tuple[int, int]]]:
    """Positions under a node whose merge keys have been merged already."""
    if id(node) in above:
        raise yaml.composer.ComposerError(None, None, "an alias stands for itself", node.start_mark)
    if isinstance(node, yaml.MappingNode):
        children = [(keys.construct_object(key, deep=True), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(index, item, item) for index, item in enumerate(node.value)]
    else:
        return
    for name, marked, value in children:
        yield (*path, name), _position(marked)
        yield from _marks(value, keys, (*path, name), (*above, id(node)))


def _position(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _not_yaml(error: yaml.MarkedYAMLError, path: Path) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    problem = error.problem or "it cannot be read"
    hint = next((f"; {hint}" for text, hint in _HINTS.items() if text in (problem, error.context)), "")
    line, column = (mark.line + 1, mark.column + 1) if mark else (None, None)
    return ConfigError(
        f"not valid YAML: {problem.removeprefix('but ')}{hint}", path=path, line=line, column=column
    )


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f": there is no folder {path.parent}"
    files = [file.name for file in path.parent.iterdir() if file.suffix in (".yml", ".yaml")]
    close = nearest(path.name, files)
    return f"; did you mean {path.parent / close}?" if close else ""
