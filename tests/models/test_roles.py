"""System and developer messages in every family: none is lost, none moves, and conversations still extend."""

from __future__ import annotations

from itertools import chain, count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.core.call import ChatRequest
from etude.core.errors import ImpossibleCall
from etude.models.probe import PROBES, QUESTION, RESULT, TOOL
from tests.models.families import FAMILIES, template
from tests.models.shapes import Shape, played
from tests.models.test_template import template_of
from tests.models.tiny_models import CHATML

pytest.importorskip("trl", reason="the families' chat templates come from TRL's package")

RULES = st.lists(st.sampled_from(["system", "developer"]), max_size=2)
TURNS = st.tuples(RULES, st.sampled_from([["user"], ["user", "user"]]), RULES).map(
    lambda turn: [*chain(*turn)]
)
"""The roles of the messages between two answers; at least one is the user's."""
LATER = TURNS | st.lists(st.sampled_from(["system", "developer"]), min_size=1, max_size=2)
EACH = pytest.mark.parametrize("name", FAMILIES)


@st.composite
def conversations(draw):
    """Conversations of which every message says something of its own, and which a prompt ends."""
    numbers, messages = count(), []
    for roles in [draw(TURNS), *draw(st.lists(LATER, max_size=2))]:
        said = [{"role": "assistant", "content": f"Answer {next(numbers)}."}] if messages else []
        messages += said + [{"role": role, "content": f"The {role} says {next(numbers)}."} for role in roles]
    return tuple(messages)


@EACH
@given(messages=conversations())
@settings(max_examples=4, deadline=None)
def test_every_message_is_written_in_its_place_and_conversations_extend(name, messages):
    of = template(name)
    text, end = of.decode(of.prompt(ChatRequest(messages)).ids), 0
    for message in messages:
        assert message["content"] in text[end:], (message, text)
        end = text.index(message["content"], end)
    # The table says of which families conversations drift, for reasons of their own.
    assert FAMILIES[name].drifts or not played(of, Shape("drawn", messages)).drift


@EACH
def test_coding_agents_speak_to_every_family(name):
    """As Codex and Claude Code do: two developer messages with tools, one of the system after a result."""
    of = template(name)
    rules = [{"role": "developer", "content": f"Rule {number}."} for number in (1, 2)]
    late = {"role": "system", "content": "A late rule."}
    text = of.decode(of.prompt(ChatRequest((*rules, QUESTION), (TOOL,))).ids)
    assert [text.count(each["content"]) for each in (*rules, QUESTION)] == [1, 1, 1]
    if "a call" in of.family().written:
        cycle = (*rules, QUESTION, PROBES["a call"], RESULT, late)
        text = of.decode(of.prompt(ChatRequest(cycle, (TOOL,))).ids)
        assert text.index("Rule 2.") < text.index(RESULT["content"]) < text.index("A late rule.")


def test_what_a_template_takes_is_left_as_it_is():
    """Elsewhere, too, a conversation is written by the template alone."""
    messages = [
        {"role": "system", "content": "One."},
        {"role": "system", "content": "Two."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hi."},
        {"role": "system", "content": "Three."},
        {"role": "user", "content": "Go on."},
    ]
    of = template("qwen3")
    theirs = of.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert of.rendering.text(messages, (), {}, ask=True) == theirs


def test_later_rules_are_marked_where_the_template_refuses_them():
    rules = [{"role": role, "content": f"{role}."} for role in ("system", "developer")]
    messages = [*rules, QUESTION, PROBES["text"], rules[1]]
    assert template("qwen3_6").rendering.text(messages, (), {}, ask=False) == (
        "<|im_start|>system\nsystem.\n\ndeveloper.<|im_end|>\n"
        "<|im_start|>user\nA probed question?<|im_end|>\n"
        "<|im_start|>assistant\nA probed answer.<|im_end|>\n"
        "<|im_start|>user\n<system>\ndeveloper.\n</system><|im_end|>\n"
    )
    assert template("gemma").rendering.text(messages, (), {}, ask=False) == (
        "<bos><start_of_turn>user\nsystem.\n\ndeveloper.\n\nA probed question?<end_of_turn>\n"
        "<start_of_turn>model\nA probed answer.<end_of_turn>\n"
        "<start_of_turn>user\n<system>\ndeveloper.\n</system><end_of_turn>\n"
    )


def test_a_message_that_is_left_out_all_the_same_is_an_error_that_names_it():
    knows_no_tools = CHATML.replace(
        "for message in messages", "for message in messages if message.role != 'tool'"
    )
    messages = [QUESTION, PROBES["text"], {"role": "tool", "tool_call_id": "1", "content": "4 degrees"}]
    with pytest.raises(
        ImpossibleCall, match=r"leaves out the message of the role 'tool' .* '4 degrees'"
    ) as error:
        template_of(knows_no_tools).rendering.text(messages, (), {}, ask=True)
    assert error.value.param == "messages"
