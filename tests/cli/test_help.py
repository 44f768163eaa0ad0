"""The program answers at once and loads only what it needs; its tables are whole; its view opens."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from etude.cli.app import app
from tests.cli.projects import etude, events, finished, scripted_project
from tests.forked import program

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


NAME = "a-long-name-of-a-run-that-nobody-would-like-to-type-again-项目"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A project with a run in it."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        scripted_project(folder)
        assert etude("train", "config.yml", "--name", NAME).exit_code == 0
    return folder


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    """The current folder, with a copy of that project."""
    monkeypatch.chdir(shutil.copytree(trained, tmp_path / "copy"))
    return tmp_path / "copy"


def shown_at(columns, *arguments):
    """The lines of a command's output where a terminal has so many columns."""
    done = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, arguments)
    assert done.exit_code == 0, done.stderr
    return done.stdout.splitlines()


def test_in_a_pipe_each_row_is_a_line(run):
    listed = shown_at("", "runs", "list")
    (row,) = [line for line in listed if NAME in line and "next: " not in line]
    assert "train" in row and "finished" in row and "2/2" in row
    jobs = shown_at("", "jobs", NAME)
    assert sum("completed" in line and f"{NAME}-epoch-" in line for line in jobs) == 2


def test_the_link_that_is_printed_opens_the_run(project):
    assert etude("evaluate", "config.yml", "--name", "e").exit_code == 0
    command = [program() / "etude", "view", "e", "--port", "0"]
    with subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, text=True) as view:
        assert view.stdout is not None
        link = next(found[0] for line in view.stdout if (found := re.search(r"http\S+", line)))
        with httpx.Client(follow_redirects=True, timeout=60) as browser:
            page = browser.get(link)
        view.send_signal(signal.SIGINT)
        view.wait(60)
    assert page.status_code == 200 and str(page.url).endswith("/runs/e") and "<h1>e</h1>" in page.text


LOGGING = """
import logging

import httpx

log = logging.getLogger("agent")


async def play(example, episode):
    log.info("asking about %s", example.id)
    log.debug("in detail")
    transport = httpx.MockTransport(lambda request: httpx.Response(204))
    async with httpx.AsyncClient(transport=transport) as client:
        await client.get("http://elsewhere")
    return (await episode.chat([{"role": "user", "content": example.inputs["question"]}])).text


def correct(example, output):
    logging.info("scoring")
    return float(output == "yes")


def brief(example, output):
    return 0.5
"""


@pytest.fixture
def talking(project: Path) -> Path:
    (project / "agent.py").write_text(LOGGING)
    return project


def test_what_the_agent_logs_is_shown_with_the_time_and_a_librarys_chatter_is_not(talking: Path):
    shown = finished("evaluate", "config.yml", "--json", folder=talking)
    assert shown.returncode == 0, shown.stderr
    assert [len(event) > 0 for event in events(shown.stdout)] == [True], "standard output is JSON alone"
    lines = [line.split(" ", 2) for line in shown.stderr.splitlines() if " INFO " in line]
    assert {line[2] for line in lines} >= {"INFO agent: asking about v0", "INFO root: scoring"}
    assert all(len(date) == 10 and len(time) == 12 for date, time, _ in lines)
    assert "in detail" not in shown.stderr and "elsewhere" not in shown.stderr


@pytest.mark.parametrize(
    ("options", "levels"),
    [
        (["--log-level", "debug"], {"DEBUG", "INFO"}),
        (["--log-level=Debug"], {"DEBUG", "INFO"}),
        (["--debug"], {"DEBUG", "INFO"}),
        (["--debug", "--log-level", "info"], {"INFO"}),
        (["--log-level", "warning"], set()),
    ],
)
def test_the_level_may_stand_anywhere_on_the_line(talking: Path, options: list[str], levels: set[str]):
    for arguments in ([*options, "evaluate", "config.yml"], ["evaluate", *options, "config.yml"]):
        shown = etude(*arguments)
        assert shown.exit_code == 0, shown.stderr
        assert {level for level in ("DEBUG", "INFO") if f" {level} agent: " in shown.stderr} == levels
        assert "elsewhere" not in shown.stderr
