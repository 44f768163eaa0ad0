"""Clients that serve every episode of an agent: a request is answered by the episode it is made in."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

import httpx
import pytest
from openai import APIStatusError, AsyncOpenAI, OpenAI

from etude.integrations.nat.transport import API_KEY, BASE_URL, EpisodeTransport
from etude.store.journal import Journal
from tests.rollout.running import collect, collect_one, jobs
from tests.support import ScriptedEngine

MODEL = "policy"
SPEAKER = ContextVar("the episode that runs", default=None)


def asking(function="<workflow>"):
    """A client that was made before there was any episode."""
    http = httpx.AsyncClient(transport=EpisodeTransport(MODEL, lambda: (SPEAKER.get(), function)))
    return AsyncOpenAI(api_key=API_KEY, base_url=BASE_URL, max_retries=0, http_client=http)


def blocking():
    http = httpx.Client(transport=EpisodeTransport(MODEL, lambda: (SPEAKER.get(), "tool")))
    return OpenAI(api_key=API_KEY, base_url=BASE_URL, max_retries=0, http_client=http)


def question(text):
    return {"model": MODEL, "messages": [{"role": "user", "content": text}]}


def repeating():
    return ScriptedEngine(lambda request: request.messages[-1]["content"])


async def test_episodes_that_run_at_once_with_one_client_are_kept_apart(tmp_path):
    client = asking()

    async def workflow(example, episode):
        SPEAKER.set(episode)
        first = asyncio.create_task(client.chat.completions.create(**question(f"{example.id}, please")))
        second = await client.chat.completions.create(**question(f"{example.id} again"))
        return [(await first).choices[0].message.content, second.choices[0].message.content]

    with Journal(tmp_path / "run.db") as journal:
        records = await collect(workflow, journal, engine=repeating(), work=jobs(8))
    for record in records:
        assert record.output == [f"{record.example.id}, please", f"{record.example.id} again"]
        assert {call.request.messages[0]["content"] for call in record.calls} == set(record.output)


async def test_a_thread_may_wait_for_its_answer(tmp_path):
    client = blocking()

    async def workflow(example, episode):
        SPEAKER.set(episode)
        said = await asyncio.to_thread(client.chat.completions.create, **question("hi"))
        return said.choices[0].message.content

    with Journal(tmp_path / "run.db") as journal:
        record = await collect_one(workflow, journal, engine=repeating())
    assert (record.output, [call.function for call in record.calls]) == ("hi", ["tool"])


async def test_the_trained_model_is_for_episodes_alone():
    with pytest.raises(APIStatusError, match="a separate entry of `llms`"):
        await asking().chat.completions.create(**question("how good was it?"))
    with pytest.raises(APIStatusError, match="outside of an episode"):
        blocking().chat.completions.create(**question("how good was it?"))
