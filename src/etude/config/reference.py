"""The config reference: Markdown from the descriptions in the config classes."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import cleandoc
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from etude.config import registry
from etude.config.component import CHANGEABLE, ComponentConfig
from etude.config.descriptions import descriptions
from etude.config.registry import BASES, LISTED, NAMED, NOUNS, SINGLE
from etude.config.schema import Config
from etude.config.slots import Slot, describe, models_in

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
    return "\n".join([_INTRODUCTION, *_blocks(), *_components(package)])


def _blocks() -> Iterator[str]:
    yield "## The file\n"
    yield from _table(Config)
    for name in ("eval", "finetuning", "storage"):
        for block in _parts(Config.model_fields[name]):
            yield from _with_parts(f"`{name}`", block, 2)


def _components(package: str) -> Iterator[str]:
    for kind in BASES:
        keys = [".".join(map(str, NAMED[kind]))] if kind in NAMED else []
        keys += [".".join(map(str, path)) for path, single in SINGLE.items() if single == kind]
        keys += [".".join(map(str, LISTED[kind]))] if kind in LISTED else []
        yield f"## {NOUNS[kind].capitalize()} types\n\nIn {', '.join(f'`{key}`' for key in keys)}.\n"
        for name in registry.names(kind):
            config_type = registry.lookup(kind, name).config_type
            if config_type.__module__.partition(".")[0] == package:
                yield from _with_parts(f"`_type: {name}`", config_type, 3)


def _with_parts(title: str, model: Any, level: int) -> Iterator[str]:
    """A model's table, then those of the blocks inside of it."""
    yield f"{'#' * level} {title}\n"
    yield from _table(model)
    for name, field in model.model_fields.items():
        for part in _parts(field):
            yield from _with_parts(f"{title} › `{name}`", part, level + 1)


def _table(model: type[BaseModel]) -> Iterator[str]:
    yield f"{cleandoc(model.__doc__ or '')}\n"
    meanings = descriptions(model)
    fields = {
        name: field for name, field in model.model_fields.items() if name != "reward" and not field.exclude
    }
    if fields:
        rows = [_row(field.alias or name, field, meanings.get(name, "")) for name, field in fields.items()]
        yield "\n".join(["| key | takes | default | meaning |", "|---|---|---|---|", *rows]) + "\n"
    changeable = [
        f"`{field.alias or name}`" for name, field in fields.items() if CHANGEABLE in field.metadata
    ]
    if changeable:
        yield f"When a run goes on, these can be changed: {', '.join(changeable)}.\n"


def _row(key: str, field: FieldInfo, meaning: str) -> str:
    slot = Slot.of(field)
    takes = "the block below" if _parts(field) else describe(slot)
    if _parts(field) and not models_in(slot):
        takes += ", by a name of your own"
    cells = (f"`{key}`", takes, _default(field), " ".join(meaning.split()))
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    """Text that stays in one cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", "\\n")


def _parts(field: FieldInfo) -> list[type[BaseModel]]:
    """The blocks with a table of their own that a key holds."""
    slot = Slot(field.annotation)
    models = models_in(slot) + [model for entry in slot.below("") for model in models_in(entry)]
    return [
        model for model in models if not issubclass(model, ComponentConfig) and len(model.model_fields) > 1
    ]


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True) if not field.is_required() else PydanticUndefined
    if default is PydanticUndefined:
        return "required"
    if default is None or default == "" or isinstance(default, BaseModel) or default in ({}, []):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"
