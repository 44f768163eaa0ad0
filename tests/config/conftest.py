"""A folder with an agent in it, and a registry with small components."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from etude.config import import_path, registry
from tests.config.parts import register_parts

# A module that is first imported while the registry is isolated would be missing from it afterwards.
registry.load_entry_points()
SHIPPED = registry._registrations

AGENT = """\
def play(example, episode):
    return "42"


def correct(example, output):
    return float(output == example.expected)


def examples():
    return []
"""


@contextmanager
def use_empty_registry(entry_points: str | None = None) -> Iterator[None]:
    """Use an empty registry in the block, with the entry points of a group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_registrations", {})
        patch.setattr(registry, "_unread_group", entry_points)
        yield


@pytest.fixture
def empty_registry() -> Iterator[None]:
    with use_empty_registry():
        yield


@pytest.fixture
def parts(empty_registry: None) -> None:
    """All types that ship, but for models of this room's own."""
    own = {key: each for key, each in SHIPPED.items() if each.config_type.__module__.startswith("etude.")}
    registry._registrations |= {key: each for key, each in own.items() if key[0] != "llms"}
    register_parts()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: None) -> Iterator[Path]:
    """The current directory: it holds `my_agent.py`; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(import_path, "_folders", ())
    before = set(sys.modules)
    (tmp_path / "my_agent.py").write_text(AGENT)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
