"""The transcript of an episode that a judge reads."""

from __future__ import annotations

from typing import Any

from etude.core.call import Call, ChatRequest, Completion
from etude.core.episode import EpisodeRecord, Example
from etude.core.evaluation import EvalInputItem
from etude.core.message import Message
from etude.rewards.judge import messages_of

SYSTEM = {"role": "system", "content": "add"}
QUESTION = {"role": "user", "content": "2 + 2"}
TOOL_CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "reasoning": "hm"}
RESULT = {"role": "tool", "content": "4", "tool_call_id": "1"}
ANSWER = {"role": "assistant", "content": "4"}


def item(*calls: tuple[list[Message], Message | None], output: Any = "4") -> EvalInputItem:
    """An episode of these calls: prompt and answer of each, None for a call that failed."""
    made = tuple(
        Call(
            index=index,
            function="solve",
            model="policy",
            request=ChatRequest(tuple(prompt)),
            completion=None if answer is None else Completion(answer),
            error="gone" if answer is None else None,
        )
        for index, (prompt, answer) in enumerate(calls)
    )
    record = EpisodeRecord("e", Example("q"), 0, made, output=output)
    return EvalInputItem(id="q", output_obj=output, episode=record)


def test_a_conversation_is_shown_once_however_often_it_was_sent() -> None:
    episode = item(([SYSTEM, QUESTION], TOOL_CALL), ([SYSTEM, QUESTION, TOOL_CALL, RESULT], ANSWER))
    assert messages_of(episode) == [SYSTEM, QUESTION, TOOL_CALL, RESULT, ANSWER]


def test_conversations_that_alternate_are_told_apart() -> None:
    other = {"role": "user", "content": "check this"}
    yes = {"role": "assistant", "content": "yes"}
    episode = item(([QUESTION], TOOL_CALL), ([other], yes), ([QUESTION, TOOL_CALL, RESULT], ANSWER))
    switch = {"role": "conversation", "content": "solve, policy"}
    assert messages_of(episode) == [QUESTION, TOOL_CALL, switch, other, yes, switch, RESULT, ANSWER]


def test_an_output_that_no_message_says_comes_last() -> None:
    assert messages_of(item(([QUESTION], ANSWER), output=4))[-1] == {"role": "output", "content": 4}
    assert messages_of(EvalInputItem(id="q", output_obj="4")) == [{"role": "output", "content": "4"}]


def test_a_judge_reads_no_thinking() -> None:
    thought = ANSWER | {"reasoning_content": "two and two"}
    asked = item(([QUESTION], thought), ([QUESTION, thought, QUESTION], thought))
    assert messages_of(asked) == [QUESTION, ANSWER, QUESTION, ANSWER]
