"""OpenAI's fine-tuning rows, written out by hand."""

from etude.backends.openai_rows import supervised_row
from etude.core.call import Call, ChatRequest, Completion
from etude.core.episode import EpisodeRecord
from etude.core.example import Example
from etude.core.message import OpenAIMessage
from etude.core.trajectory import DPOItem, EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryCollection
from etude.export.rows import openai_row
from etude.export.trajectories import PhaseTrajectories
from tests.support import tool_call

CALL = tool_call("calculator", {"expression": "1+2"})
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {}}}
ASKED = {"role": "user", "content": "1 plus 2?"}


def given(role, content, **metadata):
    return EpisodeItem(role=role, content=content, metadata=metadata or None)


def said(content, *, given=False, **metadata):
    return EpisodeItem(
        role=EpisodeItemRole.ASSISTANT, content=content, logprobs=(), given=given, metadata=metadata
    )


def test_a_conversation_with_a_tool():
    trajectory = Trajectory(
        episode=[
            given(EpisodeItemRole.SYSTEM, "You calculate."),
            given(EpisodeItemRole.USER, "1 plus 2?"),
            said("", tool_calls=CALL["tool_calls"], call=0, temperature=1.0),
            given(EpisodeItemRole.TOOL, "3", tool_call_id="call_0"),
            said("3", call=1),
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


def test_replies_that_the_agent_wrote_itself_have_no_weight():
    trajectory = Trajectory(
        episode=[given(EpisodeItemRole.USER, "Hello"), said("Hi", given=True), said("Bye")], reward=1.0
    )
    weights = [message.get("weight") for message in supervised_row(trajectory)["messages"]]
    assert weights == [None, 0, None]


def test_the_environment_speaks_as_the_user():
    trajectory = Trajectory(episode=[given(EpisodeItemRole.ENVIRONMENT, "It rains."), said("Oh")], reward=1.0)
    assert supervised_row(trajectory)["messages"][0] == {"role": "user", "content": "It rains."}


def episode(name, *replies):
    """An episode of one call for each reply; each call goes on from the one before."""
    messages, calls = [ASKED], []
    for index, reply in enumerate(replies):
        request = ChatRequest(tuple(messages), (TOOL,))
        calls.append(Call(index, "<workflow>", "policy", request, Completion(reply)))
        messages = [*messages, reply, {"role": "tool", "content": "3", "tool_call_id": "call_0"}]
    return EpisodeRecord(name, Example("e"), 0, tuple(calls))


def pair(**facts):
    item = DPOItem(
        prompt=[OpenAIMessage.model_validate(ASKED)], chosen_response="good", rejected_response="bad"
    )
    return Trajectory(episode=[item], reward=1.0, metadata=facts or None)


def in_phase(trajectory):
    collection = TrajectoryCollection(trajectories=[[trajectory]], run_id="r", method="dpo")
    return PhaseTrajectories("train/1", collection, ("<workflow>",), "policy")


def test_a_pair_of_replies_is_taken_from_the_episodes_as_they_were():
    records = {"a": episode("a", CALL), "b": episode("b", {"role": "assistant", "content": "30"})}
    trajectory = pair(chosen_episode="a", rejected_episode="b", branch=0, turns=1)
    assert openai_row(trajectory, in_phase(trajectory), records.get) == {
        "input": {"messages": [ASKED], "tools": [TOOL], "parallel_tool_calls": True},
        "preferred_output": [CALL],
        "non_preferred_output": [{"role": "assistant", "content": "30"}],
    }


def test_a_pair_over_several_turns_has_no_place_in_the_format():
    answer = {"role": "assistant", "content": "3"}
    records = {"a": episode("a", CALL, answer), "b": episode("b", answer)}
    trajectory = pair(chosen_episode="a", rejected_episode="b", branch=0, turns=2)
    assert openai_row(trajectory, in_phase(trajectory), records.get) is None


def test_a_builder_that_does_not_name_the_episodes_gives_its_texts():
    trajectory = pair()
    assert openai_row(trajectory, in_phase(trajectory), {}.get) == {
        "input": {"messages": [ASKED]},
        "preferred_output": [{"role": "assistant", "content": "good"}],
        "non_preferred_output": [{"role": "assistant", "content": "bad"}],
    }
