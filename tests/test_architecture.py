"""The plan of the house, held by the code, and docs/architecture.md, held to the code.

Who may import whom, how long a file may be, what loads when; the rooms and files that the page names exist.
"""

from __future__ import annotations

import ast
import functools
import gc
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from etude.core.interfaces import Progress
from tests.size import measure

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "etude"

ROOMS = [
    "core",
    "config",
    "store",
    "wire",
    "models",
    "engines",
    "learner",
    "rollout",
    "protocols",
    "processes",
    "runtime",
    "algorithms",
    "backends",
    "groups",
    "loop",
    "show",
    "run",
    "verbs",
    "lost_versions",
    "preflight",
    "server",
    "view",
    "components",
    "integrations",
    "cli",
    "__main__",
]
"""From the ground up: a room imports only from rooms before it. A module in `src/etude` is a room too."""

MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 60

MOST = {
    "lines of source": 54_250,
    "modules": 244,
    "lines of tests": 44_362,
    "benchmark files": 12,
    "config keys": 306,
}
"""Of the whole, as `make size` counts it, with room for a fix and its test. They are only ever lowered."""

HEAVY = {"torch", "transformers", "peft", "safetensors", "tokenizers", "accelerate", "numpy"}
"""The packages of the extra `local`: nothing else may need them before a local model is built."""

TORCH_ROOMS = {"models", "learner", "engines", "backends", "preflight", "server"}
"""Rooms with modules that run or train a model here, and may have torch at their top."""

SLOW_TO_IMPORT = HEAVY | {"openai", "httpx", "matplotlib", "datasets", "pyarrow", "fastapi", "uvicorn"}
SLOW_TO_IMPORT |= {"sqlalchemy", "prometheus_client", "pydantic", "yaml"}

GUESTS = {"nat", "verifiers"}
"""Extras that need an environment of their own; their rooms have their import names."""


@functools.cache
def modules() -> dict[str, ast.Module]:
    """The syntax trees of all modules, by their dotted names."""
    gc.disable()  # Looking for garbage among them would take longer than making them.
    found = {_module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")}
    gc.freeze()
    gc.enable()
    return found


@functools.cache
def nodes() -> dict[str, list[ast.AST]]:
    """All nodes of the trees."""
    return {module: [*ast.walk(tree)] for module, tree in modules().items()}


def _module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def find_room(module: str) -> str:
    """The room of a module; the package's own `__init__` has none."""
    return module.split(".")[1] if "." in module else ""


@dataclass(frozen=True)
class Import:
    """A module that a module imports."""

    module: str
    line: int
    name: str
    is_top_level: bool
    """Not within a function."""
    is_for_typing: bool

    @property
    def package(self) -> str:
        """The top-level package of what is imported."""
        return self.name.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.name}"


@functools.cache
def imports() -> list[Import]:
    """Those of all modules."""
    return [found for module, tree in modules().items() for found in _imports(module, tree, True, False)]


def _imports(module: str, node: ast.AST, is_top_level: bool, is_for_typing: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        names: list[str] = []
        if isinstance(child, ast.Import):
            names = [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{module}:{child.lineno}: imports are absolute here"
            inside = [name for alias in child.names if (name := f"{child.module}.{alias.name}") in modules()]
            names = inside or [str(child.module)]
        for name in names:
            yield Import(module, child.lineno, name, is_top_level, is_for_typing)  # type: ignore[attr-defined]
        if not isinstance(child, ast.expr):
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            is_guarded = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from _imports(module, child, is_top_level and not is_function, is_for_typing or is_guarded)


def check(found: Iterable[object]) -> None:
    """Fail with all that was found, a line each."""
    lines = [str(each) for each in found]
    assert not lines, "\n".join(lines)


def test_every_room_is_on_the_plan():
    assert {find_room(module) for module in modules()} - {""} <= set(ROOMS), "give new rooms a place in ROOMS"


def test_rooms_import_only_from_rooms_below_them():
    """Imports for type checkers included: a reader of a room has read those below it."""
    check(
        each
        for each in imports()
        if find_room(each.module) and each.name.startswith("etude.")
        if ROOMS.index(find_room(each.name)) > ROOMS.index(find_room(each.module))
    )


def test_no_modules_import_each_other_in_a_circle():
    """Imports for type checkers included."""
    graph: dict[str, set[str]] = {}
    for each in imports():
        if each.name in modules() and "etude" not in (each.module, each.name):
            graph.setdefault(each.module, set()).add(each.name)
    TopologicalSorter(graph).prepare()  # Raises CycleError with the modules of a circle.


def test_nothing_imports_the_public_package():
    """It loads names lazily from the rooms; a room that used it would hide what it needs."""
    check(each for each in imports() if each.name == "etude" and not each.is_for_typing)


def test_modules_are_short():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCE.rglob("*.py")}
    check(f"{path}: {length} lines" for path, length in lengths.items() if length > MAX_MODULE_LINES)


def test_the_house_only_gets_smaller():
    grown = {name: count for name, count in measure().items() if count > MOST[name]}
    assert not grown, f"{grown}, where at most {MOST} are allowed: take something else away"


def test_functions_are_short():
    check(
        f"{module}:{node.lineno} {node.name}"
        for module, found in nodes().items()
        for node in found
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES
    )


def test_only_what_runs_or_trains_models_here_imports_torch_at_its_top():
    check(
        each
        for each in imports()
        if each.package in HEAVY and each.is_top_level and not each.is_for_typing
        if find_room(each.module) not in TORCH_ROOMS
    )


def test_importing_etude_is_light_and_nothing_needs_torch_before_a_model_is_loaded_here():
    """Neither the shipped components, nor the commands, nor any module of the other rooms."""
    of_guests = {each.module for each in imports() if each.package in GUESTS and each.is_top_level}
    others = sorted(
        name
        for name in modules()
        if find_room(name) not in TORCH_ROOMS | {"__main__"} and name not in of_guests
    )
    assert "etude.components" in others and "etude.cli.app" in others
    package, part, config, all_of_them = loaded_after(
        "import etude",
        "etude.workflow",
        "import etude.config.load, etude.config.builder, etude.config.schema",
        f"import {', '.join(others)}",
    )
    assert package & SLOW_TO_IMPORT == set()
    assert part & SLOW_TO_IMPORT == config & SLOW_TO_IMPORT == {"pydantic", "yaml"}
    assert not all_of_them & HEAVY


def loaded_after(*statements: str) -> list[set[str]]:
    """The top-level packages that a new process has loaded after each of the statements."""
    show = "print('loaded', *{name.partition('.')[0] for name in sys.modules})"
    script = "\n".join(["import gc, sys; gc.disable()", *(f"{each}\n{show}" for each in statements)])
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    lines = (line.split() for line in result.stdout.splitlines() if line.startswith("loaded "))
    return [set(names) for _, *names in lines]


def test_guests_are_imported_in_their_rooms_alone():
    check(
        each
        for each in imports()
        if each.package in GUESTS and not each.is_for_typing
        if not each.module.startswith(f"etude.integrations.{each.package}.")
    )


def test_few_values_follow_the_context():
    assert sum(path.read_text(encoding="utf-8").count("ContextVar(") for path in SOURCE.rglob("*.py")) <= 3


def test_nothing_is_pickled():
    check(one for one in imports() if one.package in {"pickle", "cloudpickle", "dill", "shelve", "marshal"})


def test_public_methods_have_docstrings():
    """But those that may override another class's. Ruff looks for the docstrings of modules and functions."""
    check(
        f"{module}:{node.lineno} {node.name}"
        for module, found in nodes().items()
        for scope in found
        if isinstance(scope, ast.ClassDef) and not scope.bases and not scope.name.startswith("_")
        for node in scope.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
        if not ast.get_docstring(node)
    )


def test_docstrings_say_the_thing_itself():
    """They begin with no "What", and send the reader nowhere else. The worst phrases are only quoted."""
    folders = (ROOT / name for name in ("src", "tests", "benchmarks", "examples", "docs"))
    phrases = ("whoever", "of itself", "gone on with", "that of those", "at most so many")
    bad = rf'^\s*r?"""(What|See)\b|(?<!")\b(?i:{"|".join(phrases)})\b'
    check(
        f"{path.relative_to(ROOT)}:{number}"
        for path in [*ROOT.glob("*.md"), *(each for folder in folders for each in folder.rglob("*.[pm][yd]"))]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(bad, line)
    )


def test_tests_match_the_facts_of_an_error_and_not_its_sentence():
    """No `match` has more than three words of prose in a row, so that the English can be mended."""
    fact = re.compile(r"`[^`]*`|(?<!\w)'[^']*'(?!\w)|[-/]+\w+|\w+(\\?[-./=@:]+\w+)+|\\.")
    check(
        f"{path.relative_to(ROOT)}:{each.value.lineno}: {prose[0]}"
        for path in (ROOT / "tests").rglob("*.py")
        for each in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(each, ast.keyword) and each.arg == "match"
        for parts in [[str(node.value) for node in ast.walk(each.value) if isinstance(node, ast.Constant)]]
        if (prose := re.search(r"\b([a-z]+[,;.:]? ){3,}[a-z]+\b", fact.sub(" 0 ", " 0 ".join(parts))))
    )


def test_functions_have_verbs_or_nouns_for_names():
    """No bare participles, and no `of`. The events of `Progress` say what has happened."""
    irregular = "built|done|drawn|found|given|heard|held|kept|lost|made|said|seen|sent|shown|told|won|written"
    bad = rf"(?!embed)[a-z]*[^e_]ed|[a-z]{{0,4}}(?:{irregular})|of|of_\w+|\w+_of"
    check(
        f"{path.relative_to(ROOT)}: {name}"
        for folder in ("src", "benchmarks", "examples", "tests")
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(rf"(?m)^ *(?:async )?def _*({bad})\(", path.read_text("utf-8"))
        if name not in vars(Progress) and not name.startswith("test_")
    )


PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
_STEP = re.compile(r"^(\d+)\. `([\w/]+\.py)`: `([\w.]+)`(?: → `\w+`)?\.", re.MULTILINE)
_SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
_WALK = re.compile(r"^\| ([\w ]+) \| (\d+|–) \| (\d+|–) \|", re.MULTILINE)
_WALKS = {title: (read, seen) for title, read, seen in _WALK.findall(_SECTIONS["Five walks"])}


@pytest.mark.parametrize("title", [title for title, (read, _) in _WALKS.items() if read != "–"])
def test_a_walk_leads_through_code_that_there_is_and_is_as_long_as_it_says(title: str):
    steps = _STEP.findall(_SECTIONS[title])
    check(f"{file} has no {name}" for _, file, name in steps if not _is_defined(file, name))
    assert len({file for _, file, _ in steps}) == int(_WALKS[title][0])
    numbers = re.findall(r"^(\d+)\. ", _SECTIONS[title], re.MULTILINE)
    assert numbers == [number for number, _, _ in steps] == [str(n) for n in range(1, len(steps) + 1)]


def test_a_walk_meets_as_many_files_as_the_page_says():
    output = subprocess.check_output([sys.executable, "-m", "tests.walks"], cwd=ROOT)
    found = {walk: len(files) for walk, files in json.loads(output).items()}
    assert found == {title: int(seen) for title, (_, seen) in _WALKS.items() if seen != "–"}


def _is_defined(file: str, name: str) -> bool:
    """Whether a file defines a function, class, method or field."""
    scope: ast.AST = modules()[_module_name(SOURCE / file)]
    for part in name.split("."):
        inner = [node for node in ast.iter_child_nodes(scope) if _defined_name(node) == part]
        if not inner:
            return False
        scope = inner[0]
    return True


def _defined_name(node: ast.AST) -> str | None:
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return name
        case ast.AnnAssign(target=ast.Name(id=name)):
            return name
    return None


def test_the_map_has_every_room_from_the_top_down():
    assert re.findall(r"^\| `(\w+)` \|", _SECTIONS["Rooms"], re.MULTILINE) == ROOMS[::-1]
