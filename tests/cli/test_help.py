"""The program answers at once, and loads only what it needs."""

from __future__ import annotations

import resource
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


def test_the_help_of_a_command_loads_nothing_heavy_either():
    # Except for pydantic, with which newer versions of typer read options.
    assert loaded_after("train", "--help") & HEAVY <= {"pydantic"}


def test_help_takes_less_than_a_third_of_a_second():
    """In CPU time, and the best of three: other programs run on this machine too."""
    taken = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "etude", "--help"], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(taken) < 0.3


def test_help_lists_every_command():
    shown = etude("--help").stdout
    assert all(f"\n  {command} " in shown for command in COMMANDS)


@pytest.mark.parametrize(
    "command",
    [*([name] for name in COMMANDS if name != "runs"), *(["runs", n] for n in ("list", "show", "compare"))],
)
def test_every_command_writes_json_when_asked(command):
    shown = etude(*command, "--help")
    assert shown.exit_code == 0
    assert "--json" in shown.stdout


def test_the_version_is_that_of_the_package():
    assert etude("--version").stdout.startswith("etude 0.")


def test_an_unknown_command_is_a_wrong_request():
    shown = etude("trian")
    assert shown.exit_code == 2
    assert "train" in shown.stderr
