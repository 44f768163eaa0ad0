"""An episode in words."""

from etude.core.call import Call, ChatRequest, Completion
from etude.core.episode import EpisodeRecord, Example, Failure
from etude.preflight.demo import episode_lines
from tests.support import tool_call


def episode(*turns, output="", failure=None):
    """Turns of (new messages, reply)."""
    messages, calls = [], []
    for index, (new, reply) in enumerate(turns):
        messages = [*messages, *new]
        completion = None if reply is None else Completion(reply)
        error = "the endpoint answered 500" if reply is None else None
        calls.append(Call(index, "<workflow>", "policy", ChatRequest(tuple(messages)), completion, error))
        messages = [*messages, *([reply] if reply else [])]
    return EpisodeRecord("e/1/0", Example("1"), 0, tuple(calls), output=output, failure=failure)


def user(text):
    return {"role": "user", "content": text}


def agent(text):
    return {"role": "assistant", "content": text}


def test_a_conversation_is_shown_up_to_its_reward_without_control_characters():
    call = tool_call("calculator", {"expression": "1+2"})
    result = {"role": "tool", "tool_call_id": "call_0", "content": "3"}
    record = episode(([user("1 plus 2?")], call), ([result], agent("\x1b[31m3")), output="3")
    assert episode_lines(record, 1.0) == [
        "user: 1 plus 2?",
        'policy: calculator({"expression": "1+2"})',
        "tool: 3",
        "policy: ·[31m3",
        "reward 1",
    ]


def test_a_long_conversation_is_shortened():
    turns = [([user(f"question {n}")], agent(f"answer {n}")) for n in range(20)]
    lines = episode_lines(episode(*turns, output="answer 19"), None)
    assert len(lines) <= 10
    assert lines[0] == "user: question 0"
    assert lines[-2:] == ["… 32 more …", "no reward"]


def test_failures_say_why():
    record = episode(([user("hello")], None), failure=Failure("call_failed", "agent.py:3: EngineError"))
    assert "failed: agent.py:3: EngineError" in episode_lines(record, None)
