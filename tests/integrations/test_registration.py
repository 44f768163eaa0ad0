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

registry._unread_group = None  # Nothing but what is named below.
for module in sys.argv[1:]:
    registry._registrations = {}
    importlib.import_module(module)
    print(*sorted({name for kind in registry.KINDS for name in registry.names(kind)}))
    print(*[name for name in sys.modules if name.startswith("etude.integrations.")])
"""


def import_parts(*entry_points: str) -> list[set[str]]:
    """Types and guests' modules in a process that imports these one after the other."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    modules = [declared["etude.components"][name] for name in entry_points]
    program = [sys.executable, "-c", LOADED, *modules]
    shown = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    return [set(line.split()) for line in shown.splitlines()]


def test_the_core_knows_no_guest_and_each_guest_registers_what_is_its_own() -> None:
    types, guests, types_of_nat, guests_of_nat, types_of_art, _ = import_parts("etude", "nat", "art")
    assert {"grpo", "local", "function", "jsonl", "epochs"} <= types
    assert not types & {"openpipe_art", "nat"} and not guests
    assert "nat" in types_of_nat and not types_of_nat & {"openpipe_art"}
    assert not any(name.startswith("etude.integrations.art") for name in guests_of_nat)
    assert types_of_art == {"openpipe_art"}
