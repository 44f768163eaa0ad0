"""Rows of training files with thinking in them: every answer is learned once, after what was thought."""

from __future__ import annotations

import pytest

from etude.algorithms.supervised import Supervised
from etude.core.errors import TrainingError
from etude.core.training_rows import SupervisedRow
from etude.jobs.training import units_of_rows
from tests.models.tiny_models import CHATML, chatml_policy

FORGETS = CHATML.replace(
    "{{ message.content }}{%- for call",
    "{% if message.reasoning_content and loop.last %}"
    "<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}{%- for call",
)
KEEPS = FORGETS.replace(" and loop.last", "")


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def said(text: str, thought: str, **fields: object) -> dict:
    return {"role": "assistant", "content": text, "reasoning_content": thought, **fields}


TALK = [user("1 plus 2?"), said("3", "it is 3."), user("and 2?"), said("5", "3 plus 2")]


def learned(template: str, *messages: dict) -> list[tuple[str, str]]:
    """Of each sequence its text, and the text that is learned."""
    policy = chatml_policy(template)
    (row,) = units_of_rows([SupervisedRow.model_validate({"messages": messages})], policy, Supervised())
    texts = []
    for unit in row:
        (sample,) = unit
        own = [token for token, is_learned in zip(sample.ids, sample.mask, strict=True) if is_learned]
        texts.append((policy.template.decode(sample.ids), policy.template.decode(own)))
    return texts


def test_where_thinking_stays_a_conversation_is_one_sequence() -> None:
    ((text, own),) = learned(KEEPS, *TALK)
    assert own == "<think>it is 3.</think>3<|im_end|><think>3 plus 2</think>5<|im_end|>"
    assert text.count("<think>") == 2


def test_where_earlier_thinking_is_dropped_each_answer_is_a_sequence() -> None:
    first, second = learned(FORGETS, *TALK)
    assert [own for _, own in (first, second)] == [
        "<think>it is 3.</think>3<|im_end|>",
        "<think>3 plus 2</think>5<|im_end|>",
    ]
    assert "it is 3." not in second[0] and second[0].startswith("<|im_start|>user\n1 plus 2?")


def test_thinking_of_context_may_be_dropped() -> None:
    ((text, own),) = learned(FORGETS, TALK[0], TALK[1] | {"weight": 0}, *TALK[2:])
    assert own == "<think>3 plus 2</think>5<|im_end|>" and "it is 3." not in text


def test_thinking_that_the_template_does_not_write_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"row 1: .*does not write all of reasoning_content"):
        learned(CHATML, *TALK[:2])
