"""Programs that an episode runs: in a folder of their own, with its key, and never longer than it."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from etude.core.episode import Example
from etude.rollout.collector import EpisodeJob, Limits
from tests.rollout.running import collect_one
from tests.support import ScriptedEngine, pass_time, until

ASKS = """
import os, pathlib, sys
from openai import OpenAI
answer = OpenAI().chat.completions.create(model="m", messages=[{"role": "user", "content": sys.stdin.read()}])
pathlib.Path("answer.txt").write_text(answer.choices[0].message.content)
print(os.getcwd(), os.environ["HOME"], "SECRET" in os.environ, os.environ["MODE"])
"""


async def play(workflow, journal, seconds=3600.0):
    return await collect_one(
        workflow,
        journal,
        engine=ScriptedEngine(["3"]),
        work=[EpisodeJob("train/e/0", Example("e", {}))],
        limits=Limits(timeout=seconds),
    )


def python(code):
    return [sys.executable, "-c", code]


async def test_a_program_finds_the_model_and_works_in_a_folder_that_goes(journal, monkeypatch):
    monkeypatch.setenv("SECRET", "key")
    folders = []

    async def workflow(example, episode):
        result = await episode.run(python(ASKS), input="1 + 2?", env={"MODE": "fast"})
        cwd, home, has_secret, mode = result.stdout.split()
        assert Path(cwd) == episode.folder and home != str(Path.home())
        assert (has_secret, mode, result.returncode) == ("False", "fast", 0)
        folders.append(episode.folder)
        return (episode.folder / "answer.txt").read_text()

    record = await play(workflow, journal)
    assert (record.failure, record.output) == (None, "3")
    (call,) = record.calls
    assert call.request.messages[0]["content"] == "1 + 2?"
    assert call.completion.completion_ids and call.completion.logprobs
    (note,) = record.events
    assert "ended with status 0" in note.text and str(folders[0]) in note.text
    assert not folders[0].exists()


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (python("raise SystemExit('no such task')"), "ended with status 1 .*; it last said: no such task"),
        (["nobody-has-this"], "cannot start 'nobody-has-this' in .*: No such file or directory; install it"),
    ],
)
async def test_a_program_that_fails_is_a_failed_episode(journal, command, reason):
    async def workflow(example, episode):
        await episode.run(command)
        return "never"

    record = await play(workflow, journal)
    assert record.failure is not None
    assert re.search(reason, record.failure.reason), record.failure.reason


CHILDREN = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
pathlib.Path({pids!r}).write_text(str(child.pid))
time.sleep({seconds})
"""


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="it looks processes up in /proc")
@pytest.mark.parametrize("ends", ["by itself", "by its time limit", "with its episode"])
async def test_nothing_that_a_program_started_outlives_it(journal, tmp_path, ends):
    pids = tmp_path / "pids"
    code = CHILDREN.format(pids=str(pids), seconds=0 if ends == "by itself" else 3600)
    results = []

    async def workflow(example, episode):
        limit = 600.0 if ends == "by its time limit" else None
        results.append(await episode.run(python(code), timeout=limit, check=False))
        return "over"

    playing = asyncio.create_task(play(workflow, journal, 600.0 if ends == "with its episode" else 1e12))
    await until(lambda: pids.exists() and pids.read_text() != "")
    while ends != "by itself" and not playing.done():
        pass_time(600.0)  # Again and again: the program may be ahead of the limit that it has.
        await asyncio.sleep(0.001)
    record = await playing
    await until(lambda: not is_running(int(pids.read_text())))
    if ends == "with its episode":
        assert record.failure.kind == "timeout"
    else:
        assert record.output == "over"
        assert results[0].returncode == (0 if ends == "by itself" else None)
