"""The page docs/api.md: the public names with their signatures and docstrings; `make docs` writes it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from textwrap import fill

import griffe
from pydantic import BaseModel

import etude
from etude.config.component import ComponentConfig

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
TAUGHT = {"CollectingBuilder": "etude.algorithms.collecting", "CHANGEABLE": "etude.config.component"}
"""The names that docs/extending.md imports from other modules."""

_INTRODUCTION = """\
# Python API

You import these names from `etude`, unless the entry names a module. The fields of configs and algorithms are
keys of the [config reference](config.md). A class lists what it adds to its base classes. This page is
generated from the docstrings.
"""


def render_api() -> str:
    """The page of all public names."""
    sections: dict[str, list[str]] = {
        title: [] for title in ("Functions", "Classes", "Configs and algorithms", "Errors")
    }
    for name in etude.__all__:
        # An asynchronous twin is named in the entry of the other.
        if not name.startswith("__") and not name.endswith("_async"):
            value = getattr(etude, name)
            sections[_section(name, value)] += _entry(name, value.__module__)
    sections["Other modules"] = [text for name, module in TAUGHT.items() for text in _entry(name, module)]
    texts = [text for title, entries in sections.items() for text in (f"## {title}", *entries)]
    return "\n\n".join([_INTRODUCTION.rstrip(), *texts]) + "\n"


def _section(name: str, value: object) -> str:
    if name.islower():
        return "Functions"
    if not isinstance(value, type) or _has_keys(value):
        return "Configs and algorithms"
    return "Errors" if issubclass(value, Exception) else "Classes"


def _has_keys(cls: type) -> bool:
    """Whether its fields are in the config reference."""
    in_blocks = cls.__module__ in ("etude.config.finetuning", "etude.config.schema")
    return issubclass(cls, ComponentConfig) or (in_blocks and issubclass(cls, BaseModel))


def _entry(name: str, module: str) -> Iterator[str]:
    """A heading, the signature of a function or constructor, the docstring, and the members of a class."""
    value, parsed = getattr(importlib.import_module(module), name), _parsed(module)
    shown = parsed.members.get(f"{name}_async", parsed[name])
    yield f"### {name}"
    if name in TAUGHT:
        yield f"In `{module}`."
    called = shown.members.get("__init__") if isinstance(shown, griffe.Class) else shown
    if isinstance(called, griffe.Function):
        signature = str(called.signature(name=name)).removesuffix(" -> None")
        yield f"```python\n{fill(signature, 90, subsequent_indent='    ')}\n```"
    if shown.docstring is None:  # The object itself has one, as a decorator does.
        yield value.__doc__
    for part in shown.docstring.parse("google") if shown.docstring else []:
        if isinstance(part, griffe.DocstringSectionParameters):
            yield "\n".join(f"- `{each.name}`: {' '.join(each.description.split())}" for each in part.value)
        else:
            yield part.value
    if shown.name != name:
        yield f"`await {shown.name}(…)` does the same in a program with an event loop."
    if isinstance(shown, griffe.Class) and (members := [*_members(shown, value)]):
        yield "\n".join(members)


def _members(shown: griffe.Class, cls: type) -> Iterator[str]:
    """A line for each field, property and method that the class adds to its base classes."""
    inherited = {name for base in cls.__mro__[1:] for name in vars(base)}
    for name, member in shown.members.items():
        text = member.docstring.value.partition("\n\n")[0] if member.docstring else ""
        if isinstance(member, griffe.Function):
            signature = "async " * ("async" in member.labels) + str(member.signature())
            is_shown = bool(text)
        else:
            annotation, value = getattr(member, "annotation", None), getattr(member, "value", None)
            is_field = bool(annotation) or issubclass(cls, Enum)
            signature = f"{name}: {annotation}" if annotation else name
            if is_field and "class-attribute" in member.labels and value:
                signature += "" if str(value).lower().startswith("field(") else f" = {value}"
            is_shown = (bool(text) or is_field) and not (_has_keys(cls) and "property" not in member.labels)
        if is_shown and not name.startswith("_") and name not in inherited:
            yield f"- `{signature}`" + (f": {' '.join(text.split())}" if text else "")


@functools.cache
def _parsed(module: str) -> griffe.Module:
    path = Path(importlib.import_module(module).__file__ or "")
    return griffe.visit(module, path, path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(render_api(), encoding="utf-8")
