"""OpenAI's fine-tuning rows, written out by hand, and calls as a person reads them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from etude.algorithms.samples import find_branches, make_pair, make_sample
from etude.backends.openai_api import dpo_row, supervised_row
from etude.core.call import Call, ChatRequest, Completion
from etude.core.episode import EpisodeRecord, Example
from etude.core.sample import to_trajectory
from etude.core.training_rows import DpoRow, SupervisedRow
from etude.core.trajectory import EpisodeItem, EpisodeItemRole, Trajectory
from etude.protocols import adp
from etude.show.turns import episode_transcript
from etude.store.episodes import encode_episode
from etude.store.journal import Journal
from tests.protocols.games import play_record, script
from tests.support import tool_call

CALL = tool_call("calculator", {"expression": "1+2"})
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {}}}
ASKED = {"role": "user", "content": "1 plus 2?"}


def item(role, content, **metadata):
    return EpisodeItem(role=role, content=content, metadata=metadata or None)


def reply(content, *, given=False, **metadata):
    return EpisodeItem(
        role=EpisodeItemRole.ASSISTANT, content=content, logprobs=(), given=given, metadata=metadata
    )


def test_a_conversation_with_a_tool():
    trajectory = Trajectory(
        episode=[
            item(EpisodeItemRole.SYSTEM, "You calculate."),
            item(EpisodeItemRole.USER, "1 plus 2?"),
            reply("", tool_calls=CALL["tool_calls"], call=0, temperature=1.0),
            item(EpisodeItemRole.TOOL, "3", tool_call_id="call_0"),
            reply("3", call=1),
        ],
        reward=1.0,
        tools=[TOOL],
    )
    assert supervised_row(trajectory) == {
        "messages": [
            {"role": "system", "content": "You calculate."},
            {"role": "user", "content": "1 plus 2?"},
            {"role": "assistant", "content": None, "tool_calls": CALL["tool_calls"]},
            {"role": "tool", "content": "3", "tool_call_id": "call_0"},
            {"role": "assistant", "content": "3"},
        ],
        "tools": [TOOL],
    }


def episode(name, *replies):
    """An episode of one call for each reply; each call goes on from the one before."""
    messages, calls = [ASKED], []
    for index, reply in enumerate(replies):
        request = ChatRequest(tuple(messages), (TOOL,))
        calls.append(Call(index, "<workflow>", "policy", request, Completion(reply)))
        messages = [*messages, reply, {"role": "tool", "content": "3", "tool_call_id": "call_0"}]
    return EpisodeRecord(name, Example("e"), 0, tuple(calls))


def preference(chosen, rejected):
    """The trajectory of a preference of one episode over another."""
    sides = [make_sample(side.calls, side, 1.0) for side in (chosen, rejected)]
    return to_trajectory(make_pair(*sides))


@pytest.mark.parametrize("thought", [{}, {"reasoning_content": "One and two is three."}])
def test_a_pair_of_replies_is_written_as_they_were(thought):
    called, said = CALL | thought, {"role": "assistant", "content": "30"}
    trajectory = preference(episode("a", called), episode("b", said))
    row = dpo_row(trajectory.episode[0], trajectory.tools)
    assert row == {
        "input": {"messages": [ASKED], "tools": [TOOL], "parallel_tool_calls": True},
        "preferred_output": [called],
        "non_preferred_output": [said],
    }
    assert DpoRow.model_validate(row).preferred_output[0].to_wire() == called


def test_thinking_goes_with_the_answer_and_is_learned_with_it_alone():
    """The second call repeats the first answer without its thinking: the tokens are a branch of their own."""
    thought = {"role": "assistant", "content": "3", "reasoning_content": "1 + 2"}
    more = {"role": "user", "content": "and 4?"}
    calls = [
        Call(0, "f", "m", ChatRequest((ASKED,)), Completion(thought, "stop", (1,), (2, 3), (-0.1, -0.1))),
        Call(
            1,
            "f",
            "m",
            ChatRequest((ASKED, thought, more)),
            Completion(thought | {"content": "7"}, "stop", (1, 3, 4), (2, 5), (-0.1, -0.1)),
        ),
    ]
    record = EpisodeRecord("a", Example("e"), 0, tuple(calls))
    first, second = (to_trajectory(make_sample(one, record, 1.0)) for one, _ in find_branches(record.calls))
    assert [item.content for item in first.episode] == ["1 plus 2?", "3"]
    assert first.episode[-1].metadata["reasoning_content"] == "1 + 2"
    assert [item.given for item in second.episode] == [False, True, False, False]
    row = supervised_row(second)
    assert row["messages"] == [ASKED, thought | {"weight": 0}, more, thought | {"content": "7"}]
    assert SupervisedRow.model_validate(row).messages[1].reasoning_content == "1 + 2"


QUESTION = {"role": "user", "content": "1 + 2?"}
CALLED = tool_call("add", {"a": 1, "b": 2}) | {"reasoning_content": "I add."}
RESULT = {"role": "tool", "tool_call_id": "call_0", "content": "3"}
SAID = {"role": "assistant", "content": "It is", "reasoning_content": "3, then."}


@pytest.fixture
def record() -> EpisodeRecord:
    calls = (
        Call(0, "f", "m", ChatRequest((QUESTION,)), Completion(CALLED, "tool_calls")),
        Call(1, "f", "m", ChatRequest((QUESTION, CALLED, RESULT)), Completion(SAID, "length")),
        Call(2, "f", "m", ChatRequest((QUESTION, SAID, QUESTION)), Completion(SAID, "stop")),
    )
    return EpisodeRecord("eval/e/0", Example("e"), 0, calls, output="It is")


async def test_thinking_is_a_part_of_its_own(record: EpisodeRecord, tmp_path: Path) -> None:
    with Journal(tmp_path / "run.sqlite") as journal:
        await journal.put("eval/e/0", encode_episode(record, {}))
        run: Any = SimpleNamespace(journal=journal, path=tmp_path, name="r")
        shown = yaml.safe_load(episode_transcript(run, "eval/e/0"))
    assert shown["turns"] == [
        {"user": "1 + 2?"},
        {"thinking": "I add.", "f": "", "tool_calls": [{"add": {"a": 1, "b": 2}}], "about": "call 0, v0"},
        {"tool": "3"},
        {"thinking": "3, then.", "f": "It is", "about": "call 1, v0, cut off"},
        {"user": "1 + 2?"},
        {"thinking": "3, then.", "assistant": "It is"},
        {"user": "1 + 2?"},
        {"thinking": "3, then.", "f": "It is", "about": "call 2, v0"},
    ]
    assert shown["output"] == "It is"


async def test_a_play_is_shown_as_its_tree(tmp_path: Path) -> None:
    with Journal(tmp_path / "run.sqlite") as journal:
        engine = script(prover=["one\ntwo  "], verifier=["Decision: accept"])
        played = await play_record(adp(), engine, journal)
        text = episode_transcript(SimpleNamespace(journal=journal, path=tmp_path, name="r"), played.id)
    shown = yaml.safe_load(text)
    assert (shown["protocol"], [node["agent"] for node in shown["nodes"]]) == ("adp", ["prover", "verifier"])
    assert "main: |-\n      one\n      two\n" in text
