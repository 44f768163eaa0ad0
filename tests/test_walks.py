"""The page on the architecture is true: rooms, files and functions exist."""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.test_architecture import ROOMS, SOURCE

PAGE = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")

_STEP = re.compile(
    r"^\d+\. `(?P<file>[\w/]+\.py)`: `(?P<name>[\w.]+)`(?: → `(?P<value>\w+)`)?\.", re.MULTILINE
)


@dataclass(frozen=True)
class Step:
    """A line of a walk: what to read in which file, and the value that it hands over."""

    file: str
    name: str
    value: str | None

    @property
    def module(self) -> str:
        return "etude." + self.file.removesuffix(".py").replace("/", ".")


WALKS = {
    title: [Step(**match.groupdict()) for match in _STEP.finditer(text)]
    for title, text in re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    if _STEP.search(text)
}

MOST_FILES = {
    "An option to the gradient": 6,
    "A call to the batch": 14,
    "A job to its weights": 9,
    "A job at a server": 7,
    "A killed run to its end": 9,
}


@functools.cache
def tree_of(file: str) -> ast.Module:
    return ast.parse((SOURCE / file).read_text(encoding="utf-8"))


def defined(file: str, name: str) -> bool:
    """Whether a file defines a function, class, method or field."""
    scope: ast.AST = tree_of(file)
    for part in name.split("."):
        inner = [node for node in ast.iter_child_nodes(scope) if _name_of(node) == part]
        if not inner:
            return False
        scope = inner[0]
    return True


def _name_of(node: ast.AST) -> str | None:
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return name
        case ast.AnnAssign(target=ast.Name(id=name)):
            return name
    return None


@pytest.mark.parametrize("title", MOST_FILES)
def test_what_is_to_be_read_exists(title: str):
    missing = [step for step in WALKS[title] if not defined(step.file, step.name)]
    assert not missing


@pytest.mark.parametrize("title", MOST_FILES)
def test_a_walk_is_no_longer_than_it_says(title: str):
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    (stated,) = re.findall(r"at most (\d+) files", section)
    files = {step.file for step in WALKS[title]}
    assert len(files) <= int(stated) == MOST_FILES[title]


def test_steps_are_numbered_and_all_are_read():
    for title, steps in WALKS.items():
        section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
        numbers = re.findall(r"^(\d+)\. ", section, re.MULTILINE)
        assert numbers == [str(number) for number in range(1, len(steps) + 1)], title


def test_the_map_has_every_room_from_the_top_down():
    table = PAGE.partition("\n## Rooms\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == ROOMS[::-1]
