"""Log records of user code, in real processes of the commands that run it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.projects import etude, events, finished

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
