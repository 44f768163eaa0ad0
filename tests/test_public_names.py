"""`import etude` is light, and everything public is importable from it."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import etude
from etude.config.registry import names

HEAVY = {
    "torch",
    "transformers",
    "numpy",
    "openai",
    "httpx",
    "matplotlib",
    "pydantic",
    "yaml",
    "sqlalchemy",
    "fastapi",
}


def imported_by(statement: str) -> set[str]:
    """Top-level names of the modules that a fresh interpreter has after a statement."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in result.stdout.split()}


def test_import_etude_loads_nothing_heavy():
    assert not imported_by("import etude") & HEAVY


def test_loading_configs_needs_pydantic_and_yaml_only():
    assert imported_by("import etude.config.load, etude.config.builder") & HEAVY == {
        "pydantic",
        "yaml",
    }


@pytest.mark.parametrize("name", etude.__all__)
def test_every_public_name_is_there(name: str):
    assert getattr(etude, name) is not None
    assert name in dir(etude)


def test_what_type_checkers_see_is_what_there_is():
    tree = ast.parse(Path(etude.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {}
    for node in guarded.body:
        if isinstance(node, ast.ImportFrom) and node.module != "typing":
            (alias,) = node.names
            assert alias.asname == alias.name, "a name that is imported by itself is not public to checkers"
            seen[alias.name] = getattr(importlib.import_module(node.module), alias.name)
    assert {*seen, "__version__"} == set(etude.__all__)
    assert all(getattr(etude, name) is value for name, value in seen.items())


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'etude' has no attribute 'nothing'"):
        etude.nothing  # noqa: B018


def test_registering_what_is_shipped_needs_no_training_stack():
    assert {"grpo", "dpo", "expert_iteration", "malt", "supervised"} <= {*names("trajectory_builders")}
    assert not imported_by("import etude.components") & {
        "torch",
        "transformers",
        "numpy",
        "openai",
        "matplotlib",
    }
