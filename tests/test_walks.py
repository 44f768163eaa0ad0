"""The page on the architecture is true: rooms and files exist, and each step of a walk leads to the next."""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from tests.test_architecture import ROOMS, SOURCE, imports

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


@functools.cache
def words_of(file: str) -> frozenset[str]:
    """All that a file names: modules and names that it imports, variables, attributes, what it defines."""
    words = {module for module, _ in imports(tree_of(file))}
    for node in ast.walk(tree_of(file)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                words.add(name)
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                words.add(name)
    return frozenset(words)


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


def leads(step: Step, following: Step) -> bool:
    """Whether one file imports the other or names what is read there; or both name the value between them."""
    if step.file == following.file:
        return True
    words, others = words_of(step.file), words_of(following.file)
    if step.value is not None:
        return step.value in words and step.value in others
    calls = following.module in words or following.name.rpartition(".")[2] in words
    return calls or step.module in others or step.name.rpartition(".")[2] in others


def test_every_walk_is_there():
    assert WALKS.keys() == MOST_FILES.keys()


@pytest.mark.parametrize("title", MOST_FILES)
def test_what_is_to_be_read_exists(title: str):
    missing = [step for step in WALKS[title] if not defined(step.file, step.name)]
    assert not missing


@pytest.mark.parametrize("title", MOST_FILES)
def test_each_step_leads_to_the_next(title: str):
    broken = [pair for pair in pairwise(WALKS[title]) if not leads(*pair)]
    assert not broken


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


def test_a_step_that_does_not_lead_on_is_found():
    assert not leads(Step("core/stats.py", "estimate", None), Step("store/lock.py", "RunLock.release", None))
    assert not defined("store/journal.py", "Journal.nothing")


def test_the_map_has_every_room_from_the_top_down():
    table = PAGE.partition("\n## Rooms\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == ROOMS[::-1]
