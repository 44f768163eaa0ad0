"""Environments of the real verifiers: their configs, their plays with scripted engines, and their client."""

import sys
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etude.config.import_path import make_importable
from etude.core.episode import EpisodeRecord, Example, recorded_score
from etude.core.errors import DatasetError, EngineAway, RequestError
from etude.rollout.collector import Collector, EpisodeJob, Limits
from etude.rollout.episode import Episode
from etude.rollout.workflow import Workflow
from etude.store.journal import Journal
from tests.integrations.verifiers import environments
from tests.rollout.running import collect_one, tiny_engine
from tests.support import ScriptedEngine, needs, tool_call

pytestmark = [pytest.mark.verifiers, needs("verifiers")]

EXITING = """
AsyncOpenAI = DefaultAsyncHttpxClient = dict


async def main():
    raise SystemExit("no key")
"""

MODULES = {
    "sums_env": environments.SUMS,
    "two_roles_env": environments.TWO_ROLES,
    "careless_env": environments.CARELESS,
}


@pytest.fixture(autouse=True)
def project(tmp_path: Path) -> Iterator[Path]:
    """A user's folder with the environments as modules."""
    before = list(sys.path)
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        sys.modules.pop(name, None)
    make_importable(tmp_path)
    yield tmp_path
    sys.path[:] = before


@asynccontextmanager
async def playing(block: Any, engines: dict[str, ScriptedEngine], folder: Path, **options: Any):
    """A player, and a function that plays one of its examples."""
    from etude.integrations.verifiers.environment import Tasks, open_environment
    from etude.integrations.verifiers.play import VerifiersWorkflow

    env = open_environment(block, options.get("models", {}))
    player = VerifiersWorkflow(env, Tasks(env.taskset))
    with Journal(folder / "run.db") as journal:
        collector = Collector(
            Workflow("environment", player),
            engines,
            journal,
            default_model=next(iter(engines)),
            limits=Limits(timeout=options.get("timeout", 60)),
        )

        async def play(example: Example, name: str = "episode") -> EpisodeRecord:
            return await collector.run(EpisodeJob(f"{name}/{example.id}", example))

        try:
            yield player, play
        finally:
            await player.close()


def scores_in(record: EpisodeRecord) -> dict[tuple[str, str | None], float | None]:
    return {(each.name, each.agent): each.value for each in record.events if each.kind == "score"}


async def test_an_episode_is_played_recorded_and_scored(tmp_path: Path):
    engine = ScriptedEngine(["1", "wrong"])
    async with playing("sums_env", {"policy": engine}, tmp_path) as (player, play):
        examples = player.tasks.examples("all", None, None)
        assert [example.id for example in examples] == [f"sum-{number}" for number in range(8)]
        assert examples[0] == Example("sum-0", {"name": "sum-0", "prompt": "0 + 1 ="}, "1")
        right, wrong = await play(examples[0]), await play(examples[1])
    assert (right.failure, right.output) == (None, "1")
    (call,) = right.calls
    assert call.function == "agent" and call.model == "policy"
    assert call.request.messages == ({"role": "user", "content": "0 + 1 ="},)
    assert call.completion is not None and call.completion.completion_ids == (*b"1", 2)
    assert scores_in(right) == {
        ("correct", None): 1.0,
        ("short", None): 1.0,
        ("letters", None): 1.0,
        ("reward", None): 1.5,
    }
    assert recorded_score(wrong, "reward").value == 0.0


async def test_roles_sample_from_their_own_models_and_have_their_own_rewards(tmp_path: Path):
    alice, bob = ScriptedEngine(["blue"]), ScriptedEngine(["yes", "still yes"])
    models = {"proposer": "alice", "checker": "bob"}
    engines = {"alice": alice, "bob": bob}
    async with playing("two_roles_env", engines, tmp_path, models=models) as (player, play):
        record = await play(player.tasks.examples("all", 1, None)[0])
    assert record.failure is None, record.failure
    assert [(call.function, call.model) for call in record.calls] == [
        ("proposer", "alice"),
        ("checker", "bob"),
        ("checker", "bob"),
    ]
    last = record.calls[-1].request.messages
    assert [message["content"] for message in last] == ["Check.", "blue", "yes", "Are you sure?"]
    # The second turn extends the tokens that were sampled in the first.
    first = record.calls[1].completion
    assert record.calls[2].completion.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert record.output == {"proposer": "blue", "checker": "still yes"}
    assert scores_in(record) == {
        ("agreed", None): 0.625,
        ("reward", None): 0.625,
        ("agreed", "proposer"): 0.25,
        ("reward", "proposer"): 0.25,
        ("agreed", "checker"): 1.0,
        ("reward", "checker"): 1.0,
    }


FAILING = {
    "reward": ("agent", "ZeroDivisionError: no luck"),
    "nan": ("agent", "'good' of 'agent' is nan;"),
    "sandbox": ("environment", "the box is gone"),
}


@pytest.mark.parametrize("fault", FAILING)
async def test_its_failures_are_failures_with_their_cause(fault: str, tmp_path: Path):
    block = {"taskset": {"id": "careless_env", "fault": fault}}
    async with playing(block, {"policy": ScriptedEngine(["so"])}, tmp_path) as (player, play):
        record = await play(player.tasks.examples("all", 1, None)[0])
    origin, reason = FAILING[fault]
    assert record.failure is not None and record.failure.origin == origin
    assert reason in record.failure.reason
    assert not scores_in(record)


async def test_a_model_that_does_not_answer_is_the_models_failure(tmp_path: Path):
    engine = ScriptedEngine([EngineAway("the engine has no memory left")])
    async with playing("sums_env", {"policy": engine}, tmp_path) as (player, play):
        record = await play(player.tasks.examples("all", 1, None)[0])
    assert (record.failure.kind, record.failure.origin) == ("call_failed", "model")
    assert "the engine has no memory left" in record.failure.reason


async def test_splits_share_no_task_and_are_the_same_every_time(tmp_path: Path):
    async with playing("sums_env", {"policy": ScriptedEngine([""])}, tmp_path) as (player, _):
        train = player.tasks.examples("train", None, 3)
        held_out = player.tasks.examples("validation", None, 3)
        again = player.tasks.examples("train", None, 3)
        with pytest.raises(DatasetError, match=r"8 tasks, .*8 .*held out"):
            player.tasks.examples("train", None, 8)
    assert len(train) == 5 and len(held_out) == 3 and train == again
    assert not {each.id for each in train} & {each.id for each in held_out}


async def test_a_limit_of_turns_ends_the_run_and_it_is_scored(tmp_path: Path):
    block = {"taskset": {"id": "sums_env"}, "agent": {"max_turns": 1}}
    engine = ScriptedEngine([tool_call("search", {})])
    async with playing(block, {"policy": engine}, tmp_path) as (player, play):
        record = await play(player.tasks.examples("all", 1, None)[0])
    assert record.failure is None, record.failure
    assert len(record.calls) == 1
    assert [event.text for event in record.events if event.kind == "note"] == ["agent was stopped: max_turns"]


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ("no_such_env", "no_such_env.*not found.*`no_such_env.py`"),
        ({"taskset": {"id": "sums_env"}, "agent": {"turns": 1}}, "agent.*turns"),
        ({"agent": {}}, "name its tasks"),
    ],
)
def test_wrong_blocks_are_named(block: Any, problem: str):
    from etude.integrations.verifiers.environment import read_block

    with pytest.raises(RequestError, match=problem):
        read_block(block)


ASK = [{"role": "user", "content": "Who?"}]
ASKED: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": ASK},
    "/responses": {"input": "Who?"},
    "/v1/messages": {"messages": ASK, "max_tokens": 64},
}


def make_client(episode: Episode) -> Any:
    from etude.integrations.verifiers.play import EpisodeCalls, EpisodeClient

    return EpisodeClient(EpisodeCalls(episode), "agent")


def find_dialect(path: str) -> Any:
    from verifiers.v1.dialects import DIALECTS

    return next(dialect for dialect in DIALECTS if dialect.upstream_path == path)


@pytest.mark.parametrize("answer", ["It was Ada.", tool_call("search", {"q": "Ada"})], ids=["text", "tool"])
@pytest.mark.parametrize("path", ASKED)
async def test_a_stream_is_the_answer_that_is_recorded(path: str, answer: Any, journal: Journal):
    from verifiers.v1.interception.server import _collect_stream

    async def play(example: Any, episode: Episode) -> tuple[str | None, list[str]]:
        dialect, body = find_dialect(path), {"model": "policy", "stream": True, **ASKED[path]}
        read, _ = await _collect_stream(dialect, await make_client(episode).relay(dialect, body))
        return read.message.content, [each.name for each in read.message.tool_calls or ()]

    record = await collect_one(play, journal, engine=ScriptedEngine([answer]))
    assert record.failure is None, record.failure
    assert [call.function for call in record.calls] == ["agent"]
    text, tools = record.output
    assert (text or None, tools) == (("It was Ada.", []) if isinstance(answer, str) else (None, ["search"]))


async def test_a_prompts_tokens_are_counted(journal: Journal):
    engine = tiny_engine()

    async def play(example: Any, episode: Episode) -> int:
        dialect, body = find_dialect("/v1/messages"), {"model": "policy", "messages": ASK}
        counted = await make_client(episode).relay_aux(dialect, "/v1/messages/count_tokens", body)
        await episode.chat(ASK, max_tokens=1)
        return int(counted["input_tokens"])

    record = await collect_one(play, journal, engine=engine)
    await engine.close()
    assert record.failure is None, record.failure
    completion = record.calls[0].completion
    assert completion is not None and record.output == len(completion.prompt_ids or ())


async def test_a_chat_program_that_exits_with_a_text_ends_with_status_1(monkeypatch):
    from etude.integrations.verifiers import chat

    monkeypatch.setattr(chat, "_PROGRAM", compile(EXITING, "program", "exec"))
    harness = chat.ChatHarness(chat.ChatHarnessConfig())
    monkeypatch.setattr(harness, "resolve_prompt", lambda data: ("", "?"))
    ended = await harness.launch(SimpleNamespace(model="m"), None, None, "", "", {}, None)
    assert ended.exit_code == 1 and "no key" in ended.stderr
