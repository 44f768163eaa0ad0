"""The integrations register themselves by entry points, and the core is complete without them."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]

LOADED = """
import importlib, sys
from etude.config import registry
from etude.server import extensions

registry._unread_group = None  # Nothing but what is named below.
for module in sys.argv[1:]:
    registry._registrations = {}
    importlib.import_module(module)
    print(*sorted({name for kind in registry.BASES for name in registry.names(kind)}))
    print(*extensions._paths)
    print(*[name for name in sys.modules if name.startswith("etude.integrations.")])
"""


def loaded(*entry_points: str) -> list[set[str]]:
    """Types, server extensions and guests' modules in a process that imports these one after the other."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    modules = [declared["etude.components"][name] for name in entry_points]
    program = [sys.executable, "-c", LOADED, *modules]
    shown = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    return [set(line.split()) for line in shown.splitlines()]


def test_the_core_knows_no_guest_and_each_guest_registers_what_is_its_own() -> None:
    sets = loaded("etude", "nat", "art")
    types, extensions, guests = sets[:3]
    assert {"grpo", "local", "function", "jsonl", "epochs"} <= types
    assert not types & {"openpipe_art", "nat"} and not extensions and not guests
    types, extensions, guests = sets[3:6]
    assert "nat" in types and not types & {"openpipe_art"} and not extensions
    assert not any(name.startswith("etude.integrations.art") for name in guests)
    types, extensions, _ = sets[6:]
    assert types == {"openpipe_art"}
    assert extensions == {"etude.integrations.art.serving:ArtExtension"}
