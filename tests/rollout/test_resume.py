"""Killing a collecting process with kill -9 and going on: the work is the same, and nothing is paid twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from etude.store.episodes import iter_episodes
from etude.store.run_folder import RunFolder
from tests.rollout.running import timeless

EPISODES = 400
KILLS = 4

COLLECT = f"""
import asyncio, sys
from contextlib import aclosing
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from etude.rollout.collector import Collector, Limits
from etude.rollout.workflow import workflow
from etude.store.run_folder import RunFolder
from tests.rollout.running import jobs
from tests.support import EchoEngine

@workflow
async def play(example, episode):
    messages = [{{"role": "user", "content": example.inputs["question"]}}]
    for turn in range(1 + episode.random.randrange(4)):
        reply = await episode.chat(messages)
        messages += [reply.message, {{"role": "user", "content": f"go on {{episode.random.random()}}"}}]
        episode.step_reward(episode.random.random())
    both = await asyncio.gather(episode.chat(messages), episode.chat(messages))
    if episode.random.random() < 0.1:
        raise ValueError("a failure is data too")
    return [answer.text for answer in both]

async def main():
    with RunFolder.open(sys.argv[2]) as run:
        engine = EchoEngine(log=Path(sys.argv[3]), slowly=True)
        limits = Limits(max_concurrency=8)
        collector = Collector(play, {{"policy": engine}}, run.journal, seed=5, limits=limits)
        print("ready", flush=True)
        async with aclosing(collector.collect(jobs({EPISODES}))) as records:
            async for record in records:
                pass

asyncio.run(main())
"""


def start(run: Path, log: Path) -> subprocess.Popen[str]:
    """A process that collects into the run; it is past its imports when this returns."""
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", COLLECT, str(root), str(run), str(log)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_ctrl_c_ends_a_run_at_once_and_it_can_be_resumed(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "run").close()
    process = start(tmp_path / "run", tmp_path / "run.log")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) != 0
    assert start(tmp_path / "run", tmp_path / "run.log").wait() == 0
    with RunFolder.read(tmp_path / "run") as reader:
        assert sum(1 for _ in iter_episodes(reader.journal)) == EPISODES
    sampled = (tmp_path / "run.log").read_text().split()
    assert len(sampled) - len(set(sampled)) <= 16


def journalled_keys(run: Path) -> set[str]:
    """The request keys of all calls that are in the journal."""
    with RunFolder.read(run) as reader:
        return {str(value["key"]) for key, value in reader.journal.scan() if "/call/" in key}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_run_that_is_killed_again_and_again_ends_where_an_uninterrupted_one_ends(
    tmp_path: Path, seed: int
) -> None:
    RunFolder.create(tmp_path, "whole").close()
    assert start(tmp_path / "whole", tmp_path / "whole.log").wait() == 0

    RunFolder.create(tmp_path, "killed").close()
    log, choose = tmp_path / "killed.log", random.Random(seed)
    log.touch()
    for _ in range(KILLS):
        paid, before = journalled_keys(tmp_path / "killed"), len(log.read_text().split())
        process = start(tmp_path / "killed", log)
        time.sleep(choose.uniform(0.0, 0.06))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not paid & set(log.read_text().split()[before:]), "a journalled call was sampled again"
    with RunFolder.read(tmp_path / "killed") as killed:
        assert sum(1 for _ in iter_episodes(killed.journal)) < EPISODES
    assert start(tmp_path / "killed", log).wait() == 0

    with RunFolder.read(tmp_path / "whole") as whole, RunFolder.read(tmp_path / "killed") as killed:
        expected = timeless(list(iter_episodes(whole.journal)))
        assert len(expected) == EPISODES
        assert timeless(list(iter_episodes(killed.journal))) == expected

    # What was sampled twice had not been journalled when the process was killed: at most the calls
    # in flight, of eight episodes that make two at a time.
    sampled = Counter(log.read_text().split())
    assert set(sampled) == set((tmp_path / "whole.log").read_text().split())
    assert sum(sampled.values()) - len(sampled) <= KILLS * 16
