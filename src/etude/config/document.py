"""A config as written: YAML with the position of each key, references to the environment, and overrides."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from pydantic import BaseModel

from etude.core.errors import ConfigError, RequestError, nearest

KeyPath: TypeAlias = tuple[str | int, ...]
"""The keys and list positions that lead to a value."""


@dataclass(frozen=True, slots=True)
class Document:
    """The content of a config file, or of a mapping that replaces a file."""

    data: dict[str, Any]
    path: Path | None = None
    marks: Mapping[KeyPath, tuple[int, int]] = field(default_factory=dict)
    """Line and column, from 1, of each key and list item."""
    given: Mapping[KeyPath, str] = field(default_factory=dict)
    """Paths that are not the file's, each with the argument that set it in Python; empty for `-o`."""

    def overrides(self, path: KeyPath) -> bool:
        """Return whether a path, or a key below it, is not the file's."""
        return any(each[: len(path)] == path for each in self.given)

    def name(self, path: KeyPath) -> str:
        """Return what the user calls a key: `model.max_tokens` within the argument `model`, else its path."""
        depth = next((depth for depth in range(len(path), 0, -1) if path[:depth] in self.given), 0)
        argument = self.given.get(path[:depth])
        return join_path((argument, *path[depth:]) if argument else path)

    def place(self, path: KeyPath) -> tuple[str | None, int | None, int | None]:
        """Return source, line and column of a key, or of its nearest parent if the key is not in the file."""
        sources = {key: None if argument else f"-o {join_path(key)}" for key, argument in self.given.items()}
        for depth in range(len(path), -1, -1):
            if path[:depth] in sources:
                return sources[path[:depth]], None, None
            below = [source for each, source in sources.items() if each[:depth] == path]
            # An override of a key below a scalar replaces the file's scalar.
            is_replaced = below and not any(path == each[:depth] != each for each in self.marks)
            is_given = is_replaced or any(path[: len(each)] == each for each in sources)
            if path[:depth] in self.marks and not is_given:
                return str(self.path), *self.marks[path[:depth]]
            if below:
                return below[0], None, None
        return str(self.path) if self.path else None, None, None


def join_path(path: KeyPath) -> str:
    """Return a path as people write it: `a.b.0`."""
    return ".".join(map(str, path))


def value_at(data: Any, path: KeyPath) -> Any:
    """Return the value at a path, or None if there is none."""
    for key in path:
        if not holds(data, key):
            return None
        data = data[key]
    return data


def copy_containers(data: Any) -> Any:
    """Copy mappings and lists deeply, without sharing between aliases; other values are kept."""
    if isinstance(data, dict):
        return {key: copy_containers(value) for key, value in data.items()}
    return [copy_containers(value) for value in data] if isinstance(data, list) else data


def holds(data: Any, key: str | int) -> bool:
    """Return whether `data` is a mapping with this key, or a list with this position."""
    if isinstance(data, list):
        return isinstance(key, int) and 0 <= key < len(data)
    return isinstance(data, dict) and key in data


def replace_at(data: Any, path: KeyPath, value: Any) -> None:
    """Put `value` at a path that exists."""
    value_at(data, path[:-1])[path[-1]] = value


def leaves(data: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield each value within nested mappings that is not a mapping, or is an empty one, with its path."""
    if isinstance(data, Mapping) and data:
        for key, value in data.items():
            yield from leaves(value, (*path, key))
    else:
        yield path, data


def strings(data: Any) -> Iterator[tuple[KeyPath, str]]:
    """Yield every string within `data`, with its path."""
    return ((path, value) for path, value in scalars(data) if isinstance(value, str))


def scalars(data: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every value within `data` that is no dict or list, with its path."""
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from scalars(value, (*path, key))
    else:
        yield path, data


_MOST_KEYS = 100_000
_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"

_PLAIN = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
    ),
    "merge": "<<",
}
"""Unquoted words in the core schema of YAML 1.2, by type. All others are text. In YAML 1.1 `no` is false,
`010` is 8, and `1:30` is 90."""


class _Loader(yaml.SafeLoader):
    """Reads YAML 1.2, with merge keys."""


_Loader.yaml_implicit_resolvers = {}


class _Dumper(yaml.SafeDumper):
    """Writes text that both `_Loader` and readers of YAML 1.1 read back as the same value."""


for _dialect in (_Loader, _Dumper):
    for _name, _words in _PLAIN.items():
        _dialect.add_implicit_resolver(f"{_TAG}{_name}", re.compile(f"(?:{_words})$"), None)

_Loader.add_constructor(
    f"{_TAG}int", lambda loader, node: int(node.value, {"0o": 8, "0x": 16}.get(node.value[:2], 10))
)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # PyYAML writes the line breaks of other alphabets unescaped, and reads them back as spaces.
    style = '"' if any(mark in text for mark in "\x85\u2028\u2029") else None
    return dumper.represent_scalar(f"{_TAG}str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def read_document(path: Path) -> Document:
    """Read a YAML file. Raises ConfigError if it is missing, is not YAML, or has no mapping."""
    try:
        return parse_document(path.read_text(encoding="utf-8-sig"), path)
    except FileNotFoundError:
        close = nearest(path.name, [file.name for file in path.parent.glob("*.y*ml")])
        hint = f"; did you mean {path.parent / close}?" if close else ""
        raise ConfigError(f"there is no config file {path}{hint}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; name a config file, such as {path / 'config.yml'}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read as text in UTF-8: {error}", path=path) from None


def parse_document(text: str, path: Path) -> Document:
    """Parse the text of a config. Errors name `path`. Raises ConfigError."""
    data, marks = _parse_text(text, path)
    if not marks:
        raise ConfigError("the file is empty; `etude init` writes a config to start from", path=path)
    if not isinstance(data, dict):
        kind = "a list" if isinstance(data, list) else f"'{data}'"
        raise ConfigError(f"expected a mapping of keys to values, found {kind}", path=path, line=1, column=1)
    return Document(data, path, marks)


def parse_value(text: str) -> Any:
    """Return the value of a piece of YAML. Raises ConfigError."""
    return _parse_text(text, None)[0]


def _parse_text(text: str, path: Path | None) -> tuple[Any, dict[KeyPath, tuple[int, int]]]:
    """Return the value of a text, and the position of each key; empty text has none. Raises ConfigError."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        marks = {(): (1, 1), **dict(islice(_marks(node, loader, path), _MOST_KEYS))}
        if len(marks) > _MOST_KEYS:
            raise ConfigError(f"it has over {_MOST_KEYS} keys; repeat fewer aliases", path=path)
        return loader.construct_document(node), marks
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (None, None)
        hint = "indent with spaces, and put text with ':' or '{' in quotes"
        raise ConfigError(
            f"not valid YAML: {error.problem}; {hint}", path=path, line=line, column=column
        ) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"not valid YAML: {error.reason}", path=path, line=line) from None
    except RecursionError:
        raise ConfigError("not valid YAML: it is too deep, or an alias is in itself", path=path) from None
    except (ValueError, KeyError, OverflowError) as error:
        raise ConfigError(f"not valid YAML: {error}", path=path) from None


def dump(data: Any) -> str:
    """Return YAML text that reads back as `data`."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _marks(
    node: yaml.Node, loader: _Loader, file: Path | None, path: KeyPath = ()
) -> Iterator[tuple[KeyPath, tuple[int, int]]]:
    """Yield positions under a node, merged keys before its own. Raises ConfigError for a key given twice."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*path, index), _position(item)
            yield from _marks(item, loader, file, (*path, index))
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[Any, int] = {}
    for key, value in sorted(node.value, key=lambda entry: entry[0].tag != _MERGE):
        if key.tag == _MERGE:
            for merged in value.value[::-1] if isinstance(value, yaml.SequenceNode) else [value]:
                yield from _marks(merged, loader, file, path)
        elif isinstance(key, yaml.ScalarNode):
            name, (line, column) = loader.construct_object(key), _position(key)
            if name in lines:
                known = (
                    f"key '{join_path((*path, name))}' is given twice, first in line {lines[name]}; keep one"
                )
                raise ConfigError(known, path=file, line=line, column=column)
            lines[name] = line
            yield (*path, name), (line, column)
            yield from _marks(value, loader, file, (*path, name))


def _position(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


REFERENCE = re.compile(
    r"\$(?:(?P<dollar>\$)|\{(?P<name>[A-Za-z_]\w*)(?P<default>:-(?:\$(?!\{)|[^}$])*)?\}|(?P<broken>\{))"
)
"""`${NAME}` and `${NAME:-default}`; `$$` is one dollar sign. A default holds no reference."""


def interpolate(text: str, environ: Mapping[str, str]) -> str:
    """Replace the references in `text`. As in a shell, a default also replaces an empty value.

    Raises ValueError, which names the variable, if one without a default is not set, and for another `${`.
    """

    def value(match: re.Match[str]) -> str:
        if match["dollar"]:
            return "$"
        if match["broken"]:
            raise ValueError("'${' must begin ${NAME} or ${NAME:-default}; write $${ for the text itself")
        name, default = match["name"], match["default"]
        if default is not None:
            return environ.get(name) or default.removeprefix(":-")
        if name not in environ:
            close = nearest(name, environ)
            hint = f"; did you mean '{close}'?" if close else "."
            raise ValueError(
                f"the environment variable '{name}' is not set{hint} "
                f"Set it, or give a default: ${{{name}:-default}}"
            )
        return environ[name]

    return REFERENCE.sub(value, text)


def required_variables(text: str) -> list[str]:
    """Return the variables in a text's references that have no default."""
    return [match["name"] for match in REFERENCE.finditer(text) if match["name"] and not match["default"]]


def portable_references(text: str, environ: Mapping[str, str], otherwise: str | None) -> str:
    """Rewrite references, so that they mean the same in another process as with this environment.

    A default that is used here is written out, and one that is not is left out. `otherwise` replaces
    variables that are missing there; None makes that an error.
    """

    def rewrite(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        if not name:
            return match[0]
        if default is not None and not environ.get(name):
            return default.removeprefix(":-").replace("$", "$$")
        return f"${{{name}}}" if otherwise is None else f"${{{name}:-{otherwise}}}"

    return REFERENCE.sub(rewrite, text)


@dataclass(frozen=True, slots=True)
class Override:
    """A changed key of a config."""

    path: KeyPath
    value: Any
    argument: str = ""
    """The argument that sets it in Python; empty for `-o`."""

    @property
    def source(self) -> str:
        """The argument, or `-o a.b`."""
        return self.argument or f"-o {join_path(self.path)}"


def read_override(text: str | Override) -> Override:
    """Read `key.of.the.config=value`, whose value is YAML. Raises RequestError for text of another form."""
    if isinstance(text, Override):
        return text
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise RequestError(f"-o {key}: an override is written key.of.the.config=value")
    try:
        return Override(tuple(key.split(".")), parse_value(value))
    except ConfigError as error:
        problem = f"-o {key}: the value {value!r} is not valid YAML; put it in quotes"
        raise RequestError(f"{problem} ({error})") from error


def apply_overrides(document: Document, overrides: Iterable[str | Override]) -> Document:
    """Set each override in the document, in order. Raises RequestError for one that cannot be set, and for
    two arguments that set one key. Whether a key exists is checked later."""
    data, given = copy_containers(document.data), dict(document.given)
    for override in map(read_override, overrides):
        path = set_at(data, override)
        first, given[path] = given.get(path), override.argument
        if first and override.argument not in ("", first):
            same = f"'{first}' and '{override.argument}' are the same setting; give one of them"
            raise RequestError(same)
    return replace(document, data=data, given=given)


def join_dotted(data: Any, names: Sequence[str]) -> list[str]:
    """Return the parts of a dotted path, in which a key of the data that has dots is one part: `gpt-4.1`."""
    node, joined, rest = data, list[str](), list(names)
    while rest:
        counts = range(len(rest), 1, -1) if isinstance(node, dict) else ()
        count = next((count for count in counts if ".".join(rest[:count]) in node), 1)
        joined.append(name := ".".join(rest[:count]))
        rest = rest[count:]
        node = value_at(node, (int(name) if isinstance(node, list) and name.isdecimal() else name,))
    return joined


def set_at(data: dict[str, Any], override: Override) -> KeyPath:
    """Set a value, create mappings on the way, and return the path in the data's own keys."""
    node: Any = data
    path: list[str | int] = []
    for name in join_dotted(data, [*map(str, override.path)]):
        if path:
            below = value_at(data, tuple(path))
            if isinstance(below, BaseModel):
                text = f"the given {type(below).__name__} has its own '{name}'; set it there"
                raise RequestError(f"{override.source}: {text}")
            if not isinstance(below, dict | list):
                # A component may be written as its type alone: `workflow: my_agent:play`.
                key = "address" if path == ["storage"] else "_type"
                node[path[-1]] = {key: below} if isinstance(below, str) else {}
            node = node[path[-1]]
        if isinstance(node, list) and (not name.isdecimal() or int(name) >= len(node)):
            text = f"'{name}' is not a position in a list of {len(node)}; count from 0"
            raise RequestError(f"{override.source}: {text}")
        path.append(int(name) if isinstance(node, list) else name)
    node[path[-1]] = copy_containers(override.value)
    return tuple(path)
