"""Rows of training files: every answer is learned once, as the model would say it, or the row is refused."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from etude.algorithms.imitation import Supervised
from etude.backends.job_rows import require_written, units_of_rows
from etude.core.errors import RequestError, TrainingError
from etude.core.training_rows import DpoRow, SupervisedRow
from tests.models.tiny_models import CALCULATOR, CHATML, chatml_policy

FORGETS = CHATML.replace(
    "{{ message.content }}{%- for call",
    "{% if message.reasoning_content and loop.last %}"
    "<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}{%- for call",
)
KEEPS = FORGETS.replace(" and loop.last", "")


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def reply(text: str, thought: str, **fields: object) -> dict:
    return {"role": "assistant", "content": text, "reasoning_content": thought, **fields}


TALK = [user("1 plus 2?"), reply("3", "it is 3."), user("and 2?"), reply("5", "3 plus 2")]


def learned_texts(template: str, *messages: dict) -> list[tuple[str, str]]:
    """Of each sequence its text, and the text that is learned."""
    policy = chatml_policy(template)
    given = SupervisedRow.model_validate({"messages": messages})
    (row,) = units_of_rows([("line 1", given)], policy, Supervised())
    texts = []
    for unit in row:
        (sample,) = unit
        own = [token for token, is_learned in zip(sample.ids, sample.mask, strict=True) if is_learned]
        texts.append((policy.template.decode(sample.ids), policy.template.decode(own)))
    return texts


def test_where_thinking_stays_a_conversation_is_one_sequence() -> None:
    ((text, own),) = learned_texts(KEEPS, *TALK)
    assert own == "<think>it is 3.</think>3<|im_end|><think>3 plus 2</think>5<|im_end|>"
    assert text.count("<think>") == 2


def test_where_earlier_thinking_is_dropped_each_answer_is_a_sequence() -> None:
    first, second = learned_texts(FORGETS, *TALK)
    assert [own for _, own in (first, second)] == [
        "<think>it is 3.</think>3<|im_end|>",
        "<think>3 plus 2</think>5<|im_end|>",
    ]
    assert "it is 3." not in second[0] and second[0].startswith("<|im_start|>user\n1 plus 2?")


EMPTY_THOUGHT = CHATML.replace(
    "{{ message.content }}{%- for call",
    "{% if message.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message.content }}{%- for call",
)
"""As Qwen3 writes answers without thinking: the last of them alone has an empty thought."""


def test_where_the_template_writes_earlier_answers_differently_each_answer_is_a_sequence() -> None:
    talk = [user("1 plus 2?"), LAST, user("and 2?"), LAST | {"content": "5"}]
    first, second = learned_texts(EMPTY_THOUGHT, *talk)
    assert [own for _, own in (first, second)] == [
        "<think>\n\n</think>\n\n3<|im_end|>",
        "<think>\n\n</think>\n\n5<|im_end|>",
    ]
    assert second[0].startswith("<|im_start|>user\n1 plus 2?<|im_end|>\n<|im_start|>assistant\n3<|im_end|>")


def test_an_answer_without_the_thought_that_the_prompt_begins_is_refused_with_what_to_give() -> None:
    with pytest.raises(TrainingError, match=r"message 2: .*<think>.*answer.*reasoning_content"):
        learned_texts(THINKS, user("1 plus 2?"), LAST)


def test_thinking_of_context_may_be_dropped() -> None:
    ((text, own),) = learned_texts(FORGETS, TALK[0], TALK[1] | {"weight": 0}, *TALK[2:])
    assert own == "<think>3 plus 2</think>5<|im_end|>" and "it is 3." not in text


def test_thinking_that_the_template_does_not_write_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"line 1: .*template .*all of reasoning_content.*'it is 3\.'"):
        learned_texts(CHATML, *TALK[:2])


NO_TOOLS = CHATML.replace("message.tool_calls or []", "[]")
SPEAKS_OR_CALLS = CHATML.replace(
    "{{ message.content }}{%- for call",
    "{% if not message.tool_calls %}{{ message.content }}{% endif %}{%- for call",
)
FIRST_CALL = CHATML.replace("message.tool_calls or []", "(message.tool_calls or [])[:1]")
DROPS_INLINE = CHATML.replace(
    "{{ message.content }}{%- for", "{{ message.content.split('</think>')[-1] }}{%- for"
)
THINKS = CHATML + "{%- if add_generation_prompt %}<think>\n{% endif %}"
"""As Nemotron 3: the prompt begins the thinking."""
TRIMS = CHATML.replace("{{ message.content }}{%- for", "{{ message.content | trim }}{%- for")


def call(arguments: str, name: str = "calculator") -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def calls(*arguments: str, text: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "tool_calls": [*map(call, arguments)]}


def check(template: str, *messages: dict[str, Any]) -> None:
    """As an upload is."""
    row = SupervisedRow.model_validate({"messages": messages, "tools": [CALCULATOR]})
    require_written(row, chatml_policy(template).template)


LAST = {"role": "assistant", "content": "3"}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "3"}


def pair(worse: dict[str, Any], *context: dict[str, Any]) -> DpoRow:
    asked = {"messages": context or [user("1+2?")]}
    return DpoRow.model_validate(
        {"input": asked, "preferred_output": [LAST], "non_preferred_output": [worse]}
    )


@pytest.mark.parametrize(
    "arguments", ['{"a": 1', "[1, 2]", "null", "3", '"{}"', "", "{'a': 1}", '{"a": NaN}', '{"a": 1, "a": 2}']
)
@pytest.mark.parametrize("weight", [None, 0])
def test_arguments_that_are_no_json_object_are_no_row(arguments: str, weight: int | None) -> None:
    answer = calls(arguments) | ({} if weight is None else {"weight": weight})
    with pytest.raises(ValidationError, match=r"arguments .*'calculator' are (no|broken) JSON"):
        SupervisedRow.model_validate({"messages": [user("1+2?"), answer, RESULT, LAST]})
    with pytest.raises(ValidationError, match=r"arguments .*'calculator'"):
        pair(answer)


@pytest.mark.parametrize(
    ("template", "answer", "lost"),
    [
        (NO_TOOLS, calls('{"a": 1}'), "all calls of 'calculator'"),
        (SPEAKS_OR_CALLS, calls("{}", text="I reckon."), "all of content.*'I reckon.'"),
        (FIRST_CALL, calls("{}", "{}"), "all calls of 'calculator'"),
        (DROPS_INLINE, {"role": "assistant", "content": "<think>well</think>3"}, "all of content"),
        (CHATML, reply("3", "it is 3."), "all of reasoning_content.*'it is 3.'"),
        (CHATML, LAST | {"name": "alice"}, "all of name.*'alice'"),
        (CHATML, LAST | {"content": "3<|im_end|>\n"}, "it holds '<|im_end|>'".replace("|", r"\|")),
        (CHATML, calls('{"a": "<|im_end|>"}'), "it holds"),
    ],
)
def test_what_the_template_does_not_write_is_refused(
    template: str, answer: dict[str, Any], lost: str
) -> None:
    with pytest.raises(RequestError, match=lost):
        check(template, user("1+2?"), answer)
    with pytest.raises(RequestError, match=lost):
        require_written(pair(answer), chatml_policy(template).template)


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        (CHATML, calls(json.dumps({"text": 'a "b"\n\t\\ é', "list": [{"x": None}], "n": True}))),
        (CHATML, calls("{}", "{}", text="Both.")),
        (CHATML, {"role": "assistant", "tool_calls": [call("{}"), call('{"n": 1}', "counter")]}),
        (CHATML, LAST | {"content": ""}),
        (TRIMS, LAST | {"content": "  3\n"}),
        (THINKS, LAST | {"content": "<think>\nwell\n</think>\n\n3"}),
        (SPEAKS_OR_CALLS, calls("{}")),
        (KEEPS, reply("3", " it is 3.\n")),
    ],
)
def test_what_the_template_writes_is_learned(template: str, answer: dict[str, Any]) -> None:
    check(template, user("1+2?"), answer)


def test_a_conversation_that_begins_with_the_assistant_says_what_to_do() -> None:
    with pytest.raises(RequestError, match=r"message before it, .*weight 0"):
        check(CHATML, LAST, user("and 2?"), LAST)
    check(CHATML, LAST | {"weight": 0}, user("and 2?"), LAST)


def test_calls_in_the_context_are_written_too() -> None:
    template, context = chatml_policy(NO_TOOLS).template, [user("1+2?"), calls("{}"), RESULT]
    rows = [
        pair(LAST, *context),
        SupervisedRow.model_validate({"messages": [context[0], context[1] | {"weight": 0}, RESULT, LAST]}),
    ]
    for row in rows:
        with pytest.raises(RequestError, match=r"message 2: .*template .*'calculator'; .*tool calls"):
            require_written(row, template)
        require_written(row, chatml_policy().template)


def test_a_refusal_beside_a_content_is_not_lost() -> None:
    with pytest.raises(ValidationError, match=r"content .*refusal"):
        SupervisedRow.model_validate({"messages": [user("1+2?"), LAST | {"refusal": "I cannot."}]})
