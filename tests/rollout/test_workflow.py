"""Workflows, async or plain functions: their outputs kept as they are, and scores measured inside."""

import asyncio
import functools
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy
import pydantic
import pytest
import torch

from etude.core.call import ChatRequest
from etude.core.episode import Event, recorded_score
from etude.core.errors import EpisodeError, RequestError
from etude.core.evaluation import EvalInputItem
from etude.rollout.collector import Limits
from etude.rollout.evaluation import make_item
from etude.rollout.evaluator import MeasuredEvaluator
from etude.rollout.recorder import function
from etude.rollout.workflow import as_workflow, workflow
from etude.show.turns import list_turns
from etude.store.episodes import read_episode
from etude.store.journal import Journal
from tests.rollout.running import collect, collect_one, jobs, timeless
from tests.support import EchoEngine, ScriptedEngine


async def play(example, episode):
    return "async"


def play_plain(example, episode):
    return "plain"


class Agent:
    async def __call__(self, example, episode):
        return "object"


def test_the_decorator_makes_a_workflow_and_leaves_the_function_callable() -> None:
    bare = workflow(play_plain)
    named = workflow(name="solver", timeout=3)(play_plain)
    assert (bare.name, bare.timeout) == ("play_plain", None)
    assert (named.name, named.timeout) == ("solver", 3)
    assert bare(None, None) == "plain"
    assert bare.where.startswith(__file__)


@pytest.mark.parametrize(
    ("fn", "is_async"),
    [
        (play, True),
        (play_plain, False),
        (Agent(), True),
        (functools.partial(play), True),
        (functools.partial(workflow(play)), True),
        (function(play), True),
    ],
)
def test_async_functions_are_told_from_plain_ones(fn, is_async: bool) -> None:
    assert as_workflow(fn).is_async is is_async


@pytest.mark.parametrize("thing", ["play", 3, None, Agent])
def test_what_is_no_function_is_refused(thing: object) -> None:
    for candidate in (thing, workflow(name="x")(thing)):
        with pytest.raises(RequestError, match=f"workflow .* function .* found {thing!r}"):
            as_workflow(candidate)


def test_a_function_that_takes_too_little_is_refused_with_its_place() -> None:
    @workflow
    def one(example):
        return example

    line = one.fn.__code__.co_firstlineno
    with pytest.raises(RequestError, match=rf"test_workflow\.py:{line}: workflow 'one' is called with"):
        as_workflow(one)


def test_a_function_that_needs_more_is_refused_unless_it_is_given() -> None:
    @workflow
    def three(example, episode, strategy):
        return strategy

    with pytest.raises(RequestError, match="argument: 'strategy'"):
        three.check(complete=True)
    as_workflow(three, arguments={"strategy": "fast"}).check(complete=True)
    with pytest.raises(RequestError, match="unexpected keyword argument 'stratgy'"):
        as_workflow(three, arguments={"stratgy": "fast"})


async def test_a_partial_of_a_workflow_keeps_what_was_declared(journal: Journal) -> None:
    @workflow(name="solver", timeout=3)
    async def write(example, episode, style):
        return style

    partial = as_workflow(functools.partial(write, style="short"))
    assert (partial.name, partial.timeout) == ("solver", 3)
    assert (await collect_one(partial, journal)).output == "short"


async def test_parameters_in_another_order_get_the_values_of_their_names(journal: Journal) -> None:
    record = await collect_one(lambda episode, example: [episode.example.id, example.id], journal)
    assert record.output == ["0", "0"]
    with pytest.raises(RequestError, match=r"'episode' .* 'example'"):
        as_workflow(lambda episode, state: None)


ASK = [{"role": "user", "content": "hi"}]


class Answer(pydantic.BaseModel):
    value: int


@pytest.mark.parametrize(
    ("returned", "output"),
    [("", ""), (torch.tensor(2), 2), ([numpy.int64(1), (2,)], [1, [2]]), (Answer(value=1), {"value": 1})],
)
async def test_values_are_kept(journal: Journal, returned: Any, output: Any) -> None:
    async def play(example, episode):
        return returned

    record = await collect_one(play, journal)
    assert (record.output, type(record.output), record.failure) == (output, type(output), None)


async def test_a_reply_within_an_output_is_its_text_too(journal: Journal) -> None:
    async def play(example, episode):
        reply = await episode.chat(ASK)
        return {"answer": reply, "all": (reply,)}

    record = await collect_one(play, journal, engine=ScriptedEngine(["four"]))
    assert record.output == {"answer": "four", "all": ["four"]}


def cyclic() -> list[Any]:
    holds_itself: list[Any] = []
    holds_itself.append(holds_itself)
    return holds_itself


async def never_awaited() -> str:
    return "4"


async def stream() -> Any:
    yield "4"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda example, episode: never_awaited(), "returned a coroutine .* `async def`"),
        (lambda example, episode: asyncio.get_running_loop().create_future(), "Future .* `async def`"),
        (lambda example, episode: (word for word in "four"), "returned a generator .*`yield`"),
        (lambda example, episode: stream(), "returned an async_generator .*`yield`"),
        (lambda example, episode: example, "returned an Example .*; return "),
        (lambda example, episode: episode.chat, r"builtins\.method .* JSON"),
        (lambda example, episode: numpy.zeros(2), r"numpy\.ndarray is not JSON; return text"),
        (lambda example, episode: {1: "int", "1": "text"}, "two keys .* 1 and '1'"),
        (lambda example, episode: cyclic(), "contains itself .* deep"),
    ],
)
async def test_what_is_no_output_fails_the_episode_in_a_sentence(
    journal: Journal, make: Any, told: str
) -> None:
    async def play(example, episode):
        return make(example, episode)

    record = await collect_one(play, journal)
    assert record.output is None
    assert record.failure.kind == "no_output"
    assert re.search(rf"test_workflow\.py:\d+.*{told}", record.failure.reason)


async def test_a_reply_that_calls_tools_and_says_nothing_is_no_answer(journal: Journal) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}

    async def play(example, episode):
        return await episode.chat(ASK)

    record = await collect_one(play, journal, engine=ScriptedEngine([message]))
    assert record.failure and re.search(r"tools \(look\); .*`reply\.message`", record.failure.reason)


async def game(example, episode):
    await episode.chat([{"role": "user", "content": "go"}])
    episode.score("reward", 0.25, "too slow")
    episode.score("reward", True)
    episode.score("reward", -1, "lost", agent="bob")
    episode.step_reward(0.5, agent="bob")
    return "over"


async def test_a_score_is_in_the_journal_and_the_last_one_counts(journal: Journal):
    record = await collect_one(game, journal)
    assert record.events == (
        Event("score", 0, 0.25, "too slow", "reward"),
        Event("score", 0, 1.0, "", "reward"),
        Event("score", 0, -1.0, "lost", "reward", "bob"),
        Event("step_reward", 0, 0.5, agent="bob"),
    )
    assert read_episode(journal, record.id) == record
    assert [turn.as_json() for turn in list_turns(record)[-3:]] == [
        {"reward": "1"},
        {"reward of bob": "-1; lost"},
        {"step reward of bob": "0.5"},
    ]
    assert (recorded_score(record, "reward"), recorded_score(record, "speed")) == (record.events[1], None)


async def test_an_evaluator_reads_it_by_name_and_agent(journal: Journal):
    item = make_item(await collect_one(game, journal))
    own = await MeasuredEvaluator("reward").evaluate_item(item)
    bobs = await MeasuredEvaluator("reward", "bob").evaluate_item(item)
    assert (own.score, bobs.score, bobs.reasoning) == (1.0, -1.0, "lost")
    missing = await MeasuredEvaluator("speed").evaluate_item(item)
    assert missing.score is None
    assert str(missing.error).endswith("no score 'speed' (it recorded: reward)")
    assert (await MeasuredEvaluator("reward").evaluate_item(EvalInputItem(id="q"))).score is None


async def test_a_plain_function_talks_to_the_model_and_is_recorded(journal: Journal) -> None:
    @function
    def search(episode):
        return episode.chat(ASK)

    def play(example, episode):
        assert threading.current_thread() is not threading.main_thread()
        first = episode.chat([{"role": "user", "content": example.inputs["question"]}])
        search(episode)
        episode.step_reward(1)
        episode.note(f"{episode.example.id} {episode.generation}")
        with episode.function("writer"):
            episode.chat(ASK)
        return [first.text, episode.id, episode.random.random()]

    record = await collect_one(play, journal)
    assert record.failure is None
    assert [call.function for call in record.calls] == ["<workflow>", "search", "writer"]
    assert [(event.kind, event.after_call) for event in record.events] == [("step_reward", 1), ("note", 1)]
    assert record.output[1] == record.id


async def test_plain_and_async_functions_give_the_same_record(tmp_path: Path) -> None:
    def plain(example, episode):
        return [episode.chat(ASK).text, episode.random.random()]

    async def with_asyncio(example, episode):
        return [(await episode.chat(ASK)).text, episode.random.random()]

    runs = []
    for name, agent in (("a", plain), ("b", with_asyncio)):
        with Journal(tmp_path / f"{name}.db") as journal:
            runs.append(timeless(await collect(agent, journal, work=jobs(5))))
    assert runs[0] == runs[1]


async def test_the_plain_openai_client_is_recorded(journal: Journal) -> None:
    def play(example, episode):
        client = episode.openai()
        answer = client.chat.completions.create(model="gpt-x", messages=ASK)
        streamed = client.chat.completions.create(model="gpt-x", messages=ASK, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
        return [answer.choices[0].message.content, text]

    record = await collect_one(play, journal, engine=ScriptedEngine(["one", "two"]))
    assert record.output == ["one", "two"]
    assert len(record.calls) == 2


async def test_a_thread_that_waits_for_a_model_is_let_go_at_the_timeout(journal: Journal) -> None:
    raised: list[BaseException] = []
    over = threading.Event()

    class Never(EchoEngine):
        async def complete(self, request: ChatRequest):
            await asyncio.Event().wait()

    def play(example, episode):
        for _ in range(2):
            try:
                episode.chat(ASK)
            except EpisodeError as error:
                raised.append(error)
        over.set()

    record = await collect_one(play, journal, engine=Never(), limits=Limits(timeout=0.05))
    assert record.failure is not None and record.failure.kind == "timeout"
    assert await asyncio.to_thread(over.wait, 60)
    assert ["is over" in str(error) for error in raised] == [True, True]


async def test_a_blocking_call_on_the_event_loop_is_refused(journal: Journal) -> None:
    kept = []

    def play(example, episode):
        kept.append(episode)

        async def on_the_loop():
            episode.chat(ASK)

        asyncio.run_coroutine_threadsafe(on_the_loop(), episode.loop.loop).result()

    record = await collect_one(play, journal)
    assert record.failure is not None and "would wait forever" in record.failure.reason


@pytest.mark.slow
def test_a_program_ends_though_a_thread_and_a_task_hang(tmp_path: Path) -> None:
    program = f"""
import asyncio, contextlib, sys, threading
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from etude.core import threads
from etude.rollout.collector import Limits
from etude.store.journal import Journal
from tests.rollout.running import collect_one

threads.GRACE_SECONDS = 0.05

def thread(example, episode):
    threading.Event().wait()

async def task(example, episode):
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)

async def main():
    for number, workflow in enumerate((thread, task)):
        with Journal(f"{{number}}.db") as journal:
            record = await collect_one(workflow, journal, limits=Limits(timeout=0.05))
            print(record.failure.kind)

asyncio.run(main())
"""
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert (answer.stdout.split(), answer.returncode) == (["timeout", "timeout"], 0), answer.stderr
