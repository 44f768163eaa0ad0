import asyncio
import contextlib
import re
import time
from pathlib import Path

import pytest

from etude.core.errors import EngineAway, EngineError, ImpossibleCall, PromptTooLong, RequestError, StoreError
from etude.rollout.collector import Collector, EpisodeJob, Limits
from etude.rollout.workflow import as_workflow
from etude.store.episodes import iter_episodes, read_episode
from etude.store.journal import Journal
from tests.rollout.running import collect, collect_one, examples, jobs, timeless
from tests.support import EchoEngine, ScriptedEngine

ASK = [{"role": "user", "content": "hi"}]


async def chatty(example, episode):
    """Three turns, two of them at the same time."""
    messages = [{"role": "user", "content": example.inputs["question"]}]
    first = await episode.chat(messages)
    messages += [first.message, {"role": "user", "content": "go on"}]
    second, third = await asyncio.gather(episode.chat(messages), episode.chat(messages, temperature=0.5))
    episode.step_reward(episode.random.random())
    return [first.text, second.text, third.text]


async def test_records_do_not_depend_on_concurrency_or_on_the_order_of_answers(tmp_path: Path) -> None:
    runs = []
    for index, (concurrency, slowly) in enumerate([(1, False), (16, True), (4, True)]):
        with Journal(tmp_path / f"{index}.db") as journal:
            records = await collect(
                chatty,
                journal,
                engine=EchoEngine(slowly=slowly),
                work=jobs(12),
                limits=Limits(max_concurrency=concurrency),
            )
            runs.append(timeless(records))
    assert runs[0] == runs[1] == runs[2]


async def test_a_changed_prompt_is_sampled_anew_on_resume_and_the_rest_is_not(journal: Journal) -> None:
    engine, words, answered = EchoEngine(), ["old"], asyncio.Event()

    async def play(example, episode):
        await episode.chat(ASK)
        await episode.chat([{"role": "user", "content": words[0]}])
        if words[0] == "old":
            answered.set()
            await asyncio.Event().wait()
        return "done"

    run = asyncio.ensure_future(collect_one(play, journal, engine=engine))
    await answered.wait()
    run.cancel()
    await asyncio.wait({run})
    words[0] = "new"
    record = await collect_one(play, journal, engine=engine)
    assert [request.messages[0]["content"] for request in engine.requests] == ["hi", "old", "new"]
    assert [call.request.messages[0]["content"] for call in record.calls] == ["hi", "new"]
    # The second call goes on from the tokens of the first, which was read back.
    assert engine.requests[-1].earlier == (record.calls[0],)


async def test_an_agent_in_a_loop_is_stopped_at_the_limit_of_calls(journal: Journal) -> None:
    async def play(example, episode):
        while True:
            await episode.chat(ASK)

    record = await collect_one(play, journal, limits=Limits(max_calls=5))
    assert record.failure and re.search(r"5 calls.* eval\.general\.max_calls", record.failure.reason)
    assert len(record.calls) == 5


class Unreadable(Exception):
    def __str__(self) -> str:
        raise SystemExit(9)


ENDS = [SystemExit(3), SystemExit("no key"), asyncio.CancelledError(), Unreadable()]


@pytest.mark.parametrize("error", ENDS, ids=lambda error: type(error).__name__)
async def test_sys_exit_in_an_agent_does_not_end_the_run(journal: Journal, error: BaseException) -> None:
    async def play(example, episode):
        raise error

    record = await collect_one(play, journal)
    assert record.failure is not None and record.failure.kind == "raised"
    assert type(error).__name__ in record.failure.reason


async def test_an_error_in_a_task_group_is_named_with_its_line(journal: Journal) -> None:
    async def part() -> int:
        return int("abc")

    async def play(example, episode):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(part())

    record = await collect_one(play, journal)
    line = f"{Path(__file__).name}:{part.__code__.co_firstlineno + 1}: ValueError: invalid literal"
    assert record.failure is not None and line in record.failure.reason


async def test_calls_that_an_agent_leaves_under_way_are_not_in_the_record(journal: Journal) -> None:
    tasks = []

    async def play(example, episode):
        tasks.append(asyncio.ensure_future(episode.chat(ASK)))
        return "done"

    record = await collect_one(play, journal)
    await asyncio.wait(tasks)
    assert record.calls == ()
    assert read_episode(journal, record.id) == record


async def test_leaving_the_loop_stops_the_episodes_under_way(journal: Journal) -> None:
    ended = []

    async def play(example, episode):
        if example.id == "0":
            return "first"
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(example.id)

    collector = Collector(as_workflow(play), {"policy": EchoEngine()}, journal)
    async with contextlib.aclosing(collector.collect(jobs(4))) as records:
        async for record in records:
            assert record.output == "first"
            break
    assert sorted(ended) == ["1", "2", "3"]
    assert [episode.id for episode in iter_episodes(journal)] == ["train/0/0"]


async def test_a_journal_that_cannot_be_written_ends_the_run(journal: Journal) -> None:
    async def play(example, episode):
        journal.close()
        with contextlib.suppress(Exception):
            await episode.chat(ASK)
        return "all is well"

    with pytest.raises(StoreError, match="closed"):
        await collect(play, journal)


def test_wrong_settings_are_refused_before_anything_runs(journal: Journal) -> None:
    with pytest.raises(RequestError, match="`llms`"):
        Collector(as_workflow(chatty), {}, journal)
    with pytest.raises(RequestError, match="no model 'other'; models: policy"):
        Collector(as_workflow(chatty), {"policy": EchoEngine()}, journal, default_model="other")
    with pytest.raises(RequestError, match=r"'temprature' .* temperature, top_p"):
        EpisodeJob("1", examples(1)[0], sampling={"temprature": 0})


class OfAnotherEngine(ImpossibleCall):
    """As a user's own engine may have it."""


@pytest.mark.parametrize(
    ("error", "origin"),
    [
        (EngineError("overloaded"), "model"),
        (EngineAway("restarting"), "model"),
        (PromptTooLong("the prompt has 9 tokens, and the context ends at 8"), "agent"),
        (OfAnotherEngine("no such language"), "agent"),
    ],
)
@pytest.mark.parametrize("client", [False, True])
async def test_a_failed_call_is_the_agents_own_when_no_model_could_answer_it(
    journal: Journal, error: EngineError, origin: str, client: bool
) -> None:
    async def play(example, episode):
        if client:
            await episode.openai().chat.completions.create(model="m", messages=ASK)
        else:
            await episode.chat(ASK)

    record = await collect_one(play, journal, engine=ScriptedEngine([error]))
    assert (record.failure.kind, record.failure.origin) == ("call_failed", origin)
    assert await collect_one(play, journal) == record  # As it is read back.


async def test_a_timeout_is_the_models_when_a_call_took_most_of_the_time(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = time.monotonic

    def all_time_passes() -> None:
        nonlocal clock
        before = clock
        clock = lambda: before() + 600.0  # noqa: E731
        monkeypatch.setattr(time, "monotonic", clock)

    class Never(ScriptedEngine):
        async def complete(self, request):
            all_time_passes()
            await asyncio.Event().wait()

    async def asks(example, episode):
        await episode.chat(ASK)

    async def dawdles(example, episode):
        all_time_passes()
        await asyncio.Event().wait()

    limits = Limits(timeout=600.0)
    waiting = await collect_one(asks, journal, engine=Never([]), limits=limits)
    assert (waiting.failure.kind, waiting.failure.origin) == ("timeout", "model")
    assert re.search(r"model call took 6\d\d s", waiting.failure.reason)
    await journal.forget("train/0/0")
    dawdling = await collect_one(dawdles, journal, engine=Never([]), limits=limits)
    assert (dawdling.failure.kind, dawdling.failure.origin) == ("timeout", "agent")
