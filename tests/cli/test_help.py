"""The program answers at once, and loads only what it needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cli.projects import etude

COMMANDS = [
    *("init", "demo", "check", "doctor", "train", "resume", "evaluate"),
    *("runs", "jobs", "episodes", "export"),
]

HEAVY = {"torch", "transformers", "numpy", "openai", "pydantic", "matplotlib", "sqlalchemy", "rich", "yaml"}


def loaded_after(*arguments: str) -> set[str]:
    """The top-level packages that a new process has loaded after a command."""
    script = (
        "import sys; sys.argv = ['etude', *sys.argv[1:]]\n"
        "from etude.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('loaded:', *{name.partition('.')[0] for name in sys.modules})"
    )
    command = [sys.executable, "-c", script, *arguments]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return set(output.rpartition("loaded:")[2].split())


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_loads_nothing_heavy(argument):
    assert sorted(loaded_after(argument) & HEAVY) == []


def test_help_lists_every_command():
    shown = etude("--help").stdout
    assert all(f"\n  {command} " in shown for command in COMMANDS)
