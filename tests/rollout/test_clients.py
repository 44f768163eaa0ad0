"""Agents that reach the model by OpenAI's client, over HTTP from another process, or as programs."""

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from etude.core.episode import Example
from etude.core.errors import RequestError
from etude.rollout.collector import EpisodeJob, Limits
from etude.store.journal import Journal
from tests.forked import programs
from tests.rollout.running import collect, collect_one, jobs
from tests.support import EchoEngine, ScriptedEngine, is_alive, pass_time, until

ASK = [{"role": "user", "content": "hi"}]


async def test_the_openai_client_makes_the_same_calls_as_chat(journal: Journal) -> None:
    async def play(example, episode):
        client = episode.openai()
        with episode.function("search"):
            first = await client.chat.completions.create(model="gpt-x", messages=ASK, temperature=0.5)
        message = first.choices[0].message
        second = await client.chat.completions.create(model="policy", messages=[*ASK, message, *ASK])
        return second.choices[0].message.content

    record = await collect_one(play, journal)
    first, second = record.calls
    assert (first.function, first.model, first.request.sampling.temperature) == ("search", "policy", 0.5)
    assert second.function == "<workflow>"
    assert second.request.messages == (*ASK, first.completion.message, *ASK)
    # The tokens of the first call are extended, and not tokenised again.
    before = first.completion.prompt_ids + first.completion.completion_ids
    assert second.completion.prompt_ids[: len(before)] == before
    assert record.output == second.completion.message["content"]


async def test_a_client_can_stand_for_one_of_several_models(journal: Journal) -> None:
    async def play(example, episode):
        client = episode.openai("large")
        for model in ("gpt-x", "small"):
            await client.chat.completions.create(model=model, messages=ASK)
        with pytest.raises(RequestError, match="no model 'tiny'"):
            episode.openai("tiny")
        with pytest.raises(openai.BadRequestError, match=r"several models; .*: small, large"):
            await episode.openai().chat.completions.create(model="gpt-x", messages=ASK)
        return "done"

    record = await collect_one(play, journal, models={"small": EchoEngine(), "large": EchoEngine()})
    assert record.failure is None, record.failure
    assert [call.model for call in record.calls] == ["large", "small"]


@pytest.mark.parametrize(("command", "told"), [("echo hi", ["echo", "hi"]), ([], ["ls", "-l"])])
async def test_a_program_is_a_list_of_words(journal: Journal, command: Any, told: list[str]) -> None:
    async def play(example, episode):
        return await episode.run(command)

    record = await collect_one(play, journal)
    assert record.failure is not None and f"takes a list, {told}" in record.failure.reason


async def test_the_client_refuses_another_address(journal: Journal) -> None:
    async def play(example, episode):
        other = episode.openai().with_options(base_url="http://judge.example/v1", api_key="sk-x")
        with pytest.raises(openai.BadRequestError, match=r"not http://judge.*openai\.AsyncOpenAI\(base_url="):
            await other.chat.completions.create(model="gpt-x", messages=ASK)
        return "done"

    record = await collect_one(play, journal)
    assert record.failure is None, record.failure
    assert not record.calls


async def test_a_key_is_void_when_its_episode_is_over(journal: Journal) -> None:
    kept = []

    async def play(example, episode):
        if example.id == "0":
            kept.append(episode.endpoint)
            return "done"
        while not kept or journal.get("train/0/0") is None:
            await episode.chat(ASK)
        stale = kept[0]
        client = openai.AsyncOpenAI(base_url=stale.base_url, api_key=stale.api_key)
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model="m", messages=ASK)
        await client.close()
        assert episode.endpoint.api_key != stale.api_key
        return "refused"

    records = await collect(play, journal, work=jobs(2), limits=Limits(max_calls=None))
    assert [record.output for record in records] == ["done", "refused"], records[1].failure


async def test_the_ids_of_answers_are_the_same_when_an_episode_is_resumed(journal: Journal) -> None:
    async def play(example, episode):
        first = await episode.openai().responses.create(model="m", input="hi")
        later = {"input": "more", "previous_response_id": first.id}
        return (await episode.openai().responses.create(model="m", **later)).output_text

    record = await collect_one(play, journal)
    assert record.output and len(record.calls) == 2
    await journal.forget(record.id)
    assert (await collect_one(play, journal, models={"policy": ScriptedEngine([])})).output == record.output


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
    """A program that has imported the official client, which takes a second, before it is started."""
    return [str(programs() / "python"), "-c", code]


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
        ([sys.executable, "-c", "raise SystemExit('no such task')"], "status 1 .*: no such task"),
        (["nobody-has-this"], "'nobody-has-this' in .*: No such file"),
    ],
)
async def test_a_program_that_fails_is_a_failed_episode(journal, command, reason):
    async def workflow(example, episode):
        await episode.run(command)
        return "never"

    record = await play(workflow, journal)
    assert re.search(reason, record.failure.reason), record.failure.reason


CHILDREN = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
pathlib.Path({pids!r}).write_text(str(child.pid))
time.sleep({seconds})
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="it looks processes up in /proc")
@pytest.mark.parametrize("ends", ["by itself", "by its time limit", "with its episode"])
async def test_nothing_that_a_program_started_outlives_it(journal, tmp_path, ends):
    pids = tmp_path / "pids"
    code = CHILDREN.format(pids=str(pids), seconds=0 if ends == "by itself" else 3600)
    results = []

    async def workflow(example, episode):
        limit = 600.0 if ends == "by its time limit" else None
        results.append(await episode.run([sys.executable, "-c", code], timeout=limit, check=False))
        return "over"

    playing = asyncio.create_task(play(workflow, journal, 600.0 if ends == "with its episode" else 1e12))
    await until(lambda: pids.exists() and pids.read_text() != "")
    while ends != "by itself" and not playing.done():
        pass_time(600.0)  # Again and again: the program may be ahead of the limit that it has.
        await asyncio.sleep(0.001)
    record = await playing
    await until(lambda: not is_alive(int(pids.read_text())))
    if ends == "with its episode":
        assert record.failure.kind == "timeout"
    else:
        assert record.output == "over"
        assert results[0].returncode == (0 if ends == "by itself" else None)
