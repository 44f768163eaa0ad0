"""The plan of the house, held by the code: who may import whom, how long a file may be, what loads when."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.size import measured

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "etude"

ROOMS = [
    "core",
    "config",
    "store",
    "alarms",
    "backup",
    "wire",
    "models",
    "inference",
    "learner",
    "budget",
    "traces",
    "rollout",
    "rewards",
    "protocols",
    "scenarios",
    "runners",
    "cluster",
    "telemetry",
    "runtime",
    "algorithms",
    "jobs",
    "backends",
    "groups",
    "loop",
    "report",
    "trackers",
    "export",
    "run",
    "verbs",
    "preflight",
    "demo",
    "server",
    "view",
    "components",
    "integrations",
    "cli",
    "__main__",
]
"""From the ground up: a room imports only from rooms before it. A module in `src/etude` is a room too."""

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60

MOST = {
    "lines of source": 78_454,
    "modules": 440,
    "lines of tests": 63_483,
    "benchmark files": 15,
    "config keys": 436,
}
"""Of the whole, as `make size` counts it. These numbers are only ever lowered."""

HEAVY = {"torch", "transformers", "peft", "safetensors", "tokenizers", "accelerate", "numpy"}
"""The packages of the extra `local`: nothing else may need them before a local model is built."""

TORCH_ROOMS = {"models", "learner", "inference", "jobs", "backends", "preflight", "server"}
"""Rooms with modules that run or train a model here, and may have torch at their top."""

SLOW_TO_IMPORT = HEAVY | {
    "openai",
    "matplotlib",
    "datasets",
    "pyarrow",
    "fastapi",
    "uvicorn",
    "sqlalchemy",
    "prometheus_client",
}

TOOLKIT = "nat"
"""Import name of the NeMo Agent Toolkit, an extra: modules with it at their top are for its plug-in."""

GUESTS = {TOOLKIT, "verifiers"}
"""Extras that need an environment of their own; their rooms have their import names."""

PRINTING_ROOMS = {"cli", "report"}


@functools.cache
def modules() -> dict[str, ast.Module]:
    """The syntax trees of all modules, by their dotted names."""
    return {_dotted(path): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")}


def _dotted(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """The room of a module; the package's own `__init__` has none."""
    return module.split(".")[1] if "." in module else ""


def imports(node: ast.AST, *, top_level: bool = False, typing: bool = False) -> Iterator[tuple[str, int]]:
    """Imported modules and their lines; on demand without those in functions, or with type checkers'."""
    for child in ast.iter_child_nodes(node):
        if not typing and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if top_level and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.Import):
            yield from ((alias.name, child.lineno) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: imports are absolute here"
            names = [f"{child.module}.{alias.name}" for alias in child.names]
            inside = [name for name in names if name in modules()]
            yield from ((name, child.lineno) for name in inside or [str(child.module)])
        yield from imports(child, top_level=top_level, typing=typing)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions and methods."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_room_is_on_the_plan():
    assert {room_of(module) for module in modules()} - {""} <= set(ROOMS), "give new rooms a place in ROOMS"


def test_rooms_import_only_from_rooms_below_them():
    """Imports for type checkers included: whoever reads a room can read those below it first."""
    found = [
        f"{module}:{line} imports {imported}"
        for module, tree in modules().items()
        for imported, line in imports(tree, typing=True)
        if room_of(module) and imported.startswith("etude.")
        if ROOMS.index(room_of(imported)) > ROOMS.index(room_of(module))
    ]
    assert not found, "\n".join(found)


def test_no_modules_import_each_other_in_a_circle():
    """Imports for type checkers included."""
    graph = {
        module: {
            imported
            for imported, _ in imports(tree, typing=True)
            if imported in modules() and imported != "etude"
        }
        for module, tree in modules().items()
        if module != "etude"
    }
    TopologicalSorter(graph).prepare()  # Raises CycleError with the modules of a circle.


def test_nothing_imports_the_public_package():
    """It loads names lazily from the rooms; a room that used it would hide what it needs."""
    found = [
        f"{module}:{line}"
        for module, tree in modules().items()
        for name, line in imports(tree)
        if name == "etude"
    ]
    assert not found, "\n".join(found)


def test_modules_are_short():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCE.rglob("*.py")}
    found = [f"{path}: {length} lines" for path, length in lengths.items() if length > MAX_MODULE_LINES]
    assert not found, "\n".join(found)


def test_the_house_only_gets_smaller():
    grown = {name: count for name, count in measured().items() if count > MOST[name]}
    assert not grown, f"{grown}, where at most {MOST} are allowed: take something else away"


def test_functions_are_short():
    found = [
        f"{module}:{function.lineno} {function.name}"
        for module, tree in modules().items()
        for function in functions(tree)
        if (function.end_lineno or 0) - function.lineno >= MAX_FUNCTION_LINES
    ]
    assert not found, "\n".join(found)


def test_only_what_runs_or_trains_models_here_imports_torch_at_its_top():
    found = [
        f"{module}:{line} imports {imported}"
        for module, tree in modules().items()
        for imported, line in imports(tree, top_level=True)
        if imported.partition(".")[0] in HEAVY
        if room_of(module) not in TORCH_ROOMS
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("statement", ["import etude", "import etude; etude.Example; etude.workflow"])
def test_importing_etude_is_light(statement: str):
    assert not _loaded_after(statement) & SLOW_TO_IMPORT


def test_nothing_needs_torch_before_a_model_is_loaded_here():
    """Neither the shipped components, nor the commands, nor any module of the other rooms."""
    others = sorted(
        name
        for name, tree in modules().items()
        if room_of(name) not in TORCH_ROOMS | {"__main__"} and not _imports_guest(tree)
        if not name.startswith("etude.integrations.art.serving")  # A part of the server.
    )
    assert "etude.components" in others and "etude.cli.app" in others
    assert not _loaded_after(f"import {', '.join(others)}") & HEAVY


def test_guests_are_imported_in_their_rooms_alone():
    found = [
        f"{module}:{line}"
        for module, tree in modules().items()
        for name, line in imports(tree)
        if (guest := name.partition(".")[0]) in GUESTS
        if not module.startswith(f"etude.integrations.{guest}.")
    ]
    assert not found, "\n".join(found)


def _imports_guest(tree: ast.Module) -> bool:
    """Whether a module can only be imported where such an extra is installed."""
    return any(name.partition(".")[0] in GUESTS for name, _ in imports(tree, top_level=True))


def _loaded_after(statement: str) -> set[str]:
    """The top-level packages that a new process has loaded after a statement."""
    script = f"{statement}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_nothing_is_pickled():
    found = [
        f"{module}:{line} imports {imported}"
        for module, tree in modules().items()
        for imported, line in imports(tree)
        if imported.partition(".")[0] in {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
    ]
    assert not found, "\n".join(found)


def test_only_the_command_line_and_the_report_print():
    found = [
        f"{module}:{node.lineno}"
        for module, tree in modules().items()
        if room_of(module) not in PRINTING_ROOMS
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not found, "\n".join(found)


def test_everything_public_has_a_docstring():
    """Of itself, or as an override of a method that has one."""
    found = [
        f"{module}:{line} {name}"
        for module, tree in modules().items()
        for name, line, node in _public(tree)
        if not ast.get_docstring(node)
    ]
    assert not found, "\n".join(found)


def test_docstrings_say_the_thing_itself():
    """They neither begin with "What", nor send the reader elsewhere."""
    folders = (ROOT / name for name in ("src", "tests", "benchmarks", "examples"))
    indirect = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in folders
        for path in folder.rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.match(r'\s*r?"""(What|See)\b', line)
    ]
    assert not indirect, "\n".join(indirect)


def _public(tree: ast.Module) -> Iterator[tuple[str, int, ast.Module | ast.ClassDef | ast.FunctionDef]]:
    """The module, its public classes and functions, and the public methods of the classes."""
    yield "the module", 1, tree
    scopes: list[ast.Module | ast.ClassDef] = [tree]
    for scope in scopes:
        for node in scope.body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if node.name.startswith("_") or _is_overload(node) or _overrides(scope, node.name):
                continue
            yield node.name, node.lineno, node  # type: ignore[misc]
            if isinstance(node, ast.ClassDef):
                scopes.append(node)


def _overrides(scope: ast.Module | ast.ClassDef, name: str) -> bool:
    """Whether a base class of this package, however far above, has a documented method of that name."""
    bases = scope.bases if isinstance(scope, ast.ClassDef) else []
    above = [cls for base in bases for cls in _classes().get(ast.unparse(base).rpartition(".")[2], ())]
    return any(
        _overrides(cls, name)
        or any(getattr(node, "name", "") == name and ast.get_docstring(node) for node in cls.body)  # type: ignore[arg-type]
        for cls in above
    )


@functools.cache
def _classes() -> dict[str, list[ast.ClassDef]]:
    """The classes of the package by their names."""
    found: dict[str, list[ast.ClassDef]] = {}
    for tree in modules().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


def _is_overload(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list)
