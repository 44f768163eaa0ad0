"""The page docs/config.md: Markdown from the descriptions in the config classes; `make docs` writes it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from inspect import cleandoc, get_annotations
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic._internal._docs_extraction import extract_docstrings_from_cls
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from etude.config import registry
from etude.config.component import CHANGEABLE, ComponentConfig
from etude.config.key_types import LISTS, KeyType
from etude.config.registry import KINDS, LIVE, Kind
from etude.config.schema import Config

_INTRODUCTION = """\
# Config reference

A config is one file of YAML 1.2: `yes`, `1:30` and `2024-01-01` are text, and `010` is 10.
`${NAME}` and `${NAME:-default}` read the environment, and
`-o finetuning.num_epochs=5` on the command line takes the place of what the file says. Unknown keys are
errors. This page is generated from the config classes.

Some keys only say how a run is carried out, and not what it makes. `etude resume RUN -o key=value` may change
them; they are named below the tables. All others stay as they were when the run began.
"""


def render_reference(package: str = "etude") -> str:
    """The reference of all blocks, and of the components that `package` registers."""
    return "\n".join([_INTRODUCTION, *_Reference(package).sections()])


class _Reference:
    """Shows each block once, and keys that several components inherit once, before the first of these."""

    def __init__(self, package: str) -> None:
        self._types = {
            (kind, name): config_type
            for kind in KINDS
            for name in registry.names(kind)
            for config_type in [registry.lookup(kind, name).config_type]
            if name != LIVE and config_type.__module__.partition(".")[0] == package
        }
        self._titles: dict[type[BaseModel], str] = {}

    def sections(self) -> Iterator[str]:
        """The page, a heading or a table at a time."""
        yield "## The file\n"
        yield from self._block("", Config, 1, tuple(Config.model_fields))
        for kind, about in KINDS.items():
            keys = (".".join(map(str, place)) for place in about.places)
            yield f"## {about.noun.capitalize()} types\n\nIn {', '.join(f'`{key}`' for key in keys)}.\n"
            for (other, name), config_type in self._types.items():
                if other == kind:
                    yield from self._component(kind, name, config_type)

    def _component(self, kind: Kind, name: str, config_type: type[ComponentConfig]) -> Iterator[str]:
        keys: dict[type[BaseModel], list[str]] = {config_type: []}
        for key in _written_keys(config_type):
            base = _home(config_type, key)
            keys.setdefault(base if self._is_shared(base) else config_type, []).append(key)
        own, inherited = keys.pop(config_type), []
        for base in keys:
            if base in self._types.values():
                inherited.append(f"`_type: {base.type_name}`")  # type: ignore[attr-defined]
                continue
            if base not in self._titles:
                title = self._shared_title(kind, base)
                yield from self._block(
                    title, base, 3, [key for key in _written_keys(base) if _home(base, key) is base]
                )
            inherited.append(f"*{self._titles[base]}*")
        links = f"Further keys: {', '.join(inherited)}.\n" if inherited else ""
        yield from self._block(f"`_type: {name}`", config_type, 3, own, links)

    def _is_shared(self, base: type[BaseModel]) -> bool:
        users = [each for each in self._types.values() if issubclass(each, base)]
        return len(users) > 1 or not issubclass(base, ComponentConfig)

    def _shared_title(self, kind: Kind, base: type[BaseModel]) -> str:
        users = {key: f"`{key[1]}`" for key, each in self._types.items() if issubclass(each, base)}
        if users.keys() >= {key for key in self._types if key[0] == kind}:
            return f"Keys of every {KINDS[kind].noun}"
        return f"Keys of {', '.join(dict.fromkeys(users.values()))}"

    def _block(
        self, title: str, model: type[BaseModel], level: int, keys: Sequence[str], links: str = ""
    ) -> Iterator[str]:
        """A table of some keys of a model, then of the blocks inside it."""
        self._titles[model] = title
        inside: dict[type[BaseModel], str] = {}
        for key in keys:
            for block in _blocks_in(model.model_fields[key]):
                if block not in self._titles:
                    inside[block] = self._titles[block] = f"{title} › `{key}`" if title else f"`{key}`"
        if title:
            yield f"{'#' * level} {title}\n"
        yield from self._table(model, keys, [*inside])
        if links:
            yield links
        for block, path in inside.items():
            yield from self._block(path, block, level + 1, _written_keys(block))

    def _table(
        self, model: type[BaseModel], keys: Sequence[str], below: Collection[type[BaseModel]]
    ) -> Iterator[str]:
        yield f"{cleandoc(model.__doc__ or '')}\n"
        fields = {key: model.model_fields[key] for key in keys}
        meanings = {
            key: text
            for base in reversed(model.__mro__)
            if issubclass(base, BaseModel) and base is not BaseModel
            for key, text in extract_docstrings_from_cls(base, use_inspect=True).items()
        }
        if fields:
            rows = [
                self._row(field.alias or key, field, field.description or meanings.get(key, ""), below)
                for key, field in fields.items()
            ]
            yield "\n".join(["| key | takes | default | meaning |", "|---|---|---|---|", *rows]) + "\n"
        changeable = [
            f"`{field.alias or key}`" for key, field in fields.items() if CHANGEABLE in field.metadata
        ]
        if changeable:
            yield f"When a run is resumed, these can be changed: {', '.join(changeable)}.\n"

    def _row(self, key: str, field: FieldInfo, meaning: str, below: Collection[type[BaseModel]]) -> str:
        slot, blocks = KeyType.from_field(field), _blocks_in(field)
        takes = describe(slot)
        if blocks:
            takes = "the block below" if blocks[0] in below else f"a block: {self._titles[blocks[0]]}"
            takes += "" if models_in(slot) else ", by a name of your own"
        cells = (f"`{key}`", takes, _default(field), " ".join(meaning.split()))
        in_one_line = (cell.replace("|", "\\|").replace("\n", "\\n") for cell in cells)
        return f"| {' | '.join(in_one_line)} |"


def _written_keys(model: type[BaseModel]) -> list[str]:
    """The keys of a model that may stand in a file."""
    hidden = {"reward"} if issubclass(model, ComponentConfig) else set()
    return [key for key, field in model.model_fields.items() if key not in hidden and not field.exclude]


def _home(model: type[BaseModel], key: str) -> type[BaseModel]:
    """The class that says last what a key is."""
    return next(base for base in model.__mro__ if key in get_annotations(base))


def _blocks_in(field: FieldInfo) -> list[type[BaseModel]]:
    """The blocks with a table of their own that a key holds."""
    slot = KeyType(field.annotation)
    models = models_in(slot) + [model for entry in slot.inner_slots("") for model in models_in(entry)]
    return [
        model for model in models if not issubclass(model, ComponentConfig) and len(model.model_fields) > 1
    ]


def models_in(slot: KeyType) -> list[type[BaseModel]]:
    """The models that a slot accepts."""
    return [arm.annotation for arm in slot.arms() if arm.holds(BaseModel)]


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True) if not field.is_required() else PydanticUndefined
    if default is PydanticUndefined:
        return "required"
    if default is None or default == "" or isinstance(default, BaseModel) or default in ({}, []):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    SecretStr: "text",
    Path: "a path",
    Any: "any value",
}
_PLURALS: dict[Any, str] = {
    str: "texts",
    SecretStr: "texts",
    int: "integers",
    float: "numbers",
    Path: "paths",
    Any: "values",
}
_BOUNDS = {
    "ge": ">= {}",
    "gt": "> {}",
    "le": "<= {}",
    "lt": "< {}",
    "min_length": "of length >= {}",
    "max_length": "of length <= {}",
    "pattern": "matching {!r}",
}
"""The bounds in pydantic's metadata of a type, in words."""


def describe(slot: KeyType) -> str:
    """Return the slot in words: `an integer >= 1`, `a list of texts`, `one of 'a', 'b'`."""
    arms = slot.arms()
    words = " or ".join(dict.fromkeys(map(_word, arms)))
    bounds = dict.fromkeys(
        text.format(bound)
        for arm in arms
        for item in arm.metadata
        for name, text in _BOUNDS.items()
        if (bound := getattr(item, name, None)) is not None
    )
    return f"{words} {' and '.join(bounds)}" if bounds else words


def _word(arm: KeyType) -> str:
    annotation = arm.annotation
    if annotation in _WORDS:
        return _WORDS[annotation]
    if get_origin(annotation) is Literal:
        return _list_values(get_args(annotation))
    if arm.holds(Enum):
        return _list_values(member.value for member in annotation)
    if arm.holds(*LISTS):
        items = [
            item
            for argument in get_args(annotation)
            if argument is not ...
            for item in KeyType(argument).arms()
        ]
        return f"a list of {_PLURALS.get(items[0].annotation, describe(items[0]))}" if items else "a list"
    if arm.holds(Mapping, BaseModel):
        keys = ", ".join(arm.fields())
        return f"a mapping with the keys {keys}" if keys else "a mapping"
    return getattr(annotation, "__name__", str(annotation))


def _list_values(values: Iterable[Any]) -> str:
    listed = [repr(value) for value in values]
    return listed[0] if len(listed) == 1 else f"one of {', '.join(listed)}"


if __name__ == "__main__":
    page = Path(__file__).parents[2] / "docs" / "config.md"
    page.write_text(render_reference(), encoding="utf-8")
