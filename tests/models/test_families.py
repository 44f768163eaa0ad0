"""Real families: answers are read, conversations go on with system messages, and the docs' table says so."""

import importlib.metadata
import random
from itertools import chain, count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.core.call import ChatRequest, Completion
from etude.core.errors import EngineError, ImpossibleCall
from etude.engines.answer import parse_message
from etude.models.rendering import PROBES, QUESTION, RESULT, TOOL
from tests.models import families
from tests.models.families import FAMILIES, VALUES, Shape, play_shape, template, written_ids, written_kinds
from tests.models.test_template import make_template
from tests.models.tiny_models import CHATML, make_call

pytest.importorskip("trl", reason="the families' chat templates come from TRL's package")

QUICK = {
    *("cohere2", "deepseekv3", "gemma4", "glm4moe", "gptoss", "llama3_1", "mistral_v13", "qwen3", "qwen3_6")
}
"""One of each syntax; others are in the slow tests."""


EACH = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(FAMILIES)]
)


def cut(name, kind, tools=(TOOL,)):
    """The ids of a probe answer with its prompt, as a model would sample them."""
    of = template(name)
    request = ChatRequest((QUESTION,), tuple(tools))
    return of.prompt(request).ids, written_ids(of, request, PROBES[kind])


def read(name, prompt_ids, ids, tools=(TOOL,)):
    of = template(name)
    whole = of.decode(ids[:-1] if ids and ids[-1] in of.stop_ids else ids)
    return parse_message(of, ChatRequest((), tuple(tools)), whole, prompt_ids, ids)


@EACH
def test_a_line_of_the_docs_table_says_what_is_found(name):
    if importlib.metadata.version("trl") != families.TRL_VERSION:
        pytest.skip(f"the table is made from TRL {families.TRL_VERSION}")
    line = "| " + " | ".join(families.row(name)) + " |\n"
    page = families.PAGE.read_text(encoding="utf-8")
    assert line in page, "docs/models.md is out of date; type: make docs"
    assert f"TRL {families.TRL_VERSION}" in page and ", ".join(VALUES) in page


def test_an_unknown_tool_is_called_all_the_same():
    """The agent says that there is no such tool."""
    text = "<tool_call>other\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
    [call] = read("glm4moe", (), template("glm4moe").rendering.encode([text])[0])["tool_calls"]
    assert call["function"] == {"name": "other", "arguments": '{"a": "1"}'}


def test_tags_are_text_where_the_template_knows_no_thinking():
    text = "<think>\nhm\n</think>\n\n3"
    ids = template("qwen2_5").rendering.encode([text])[0]
    assert read("qwen2_5", (), ids) == {"role": "assistant", "content": text}


@EACH
def test_an_answer_that_is_cut_anywhere_is_no_call_and_no_crash(name):
    for kind in written_kinds(template(name)):
        prompt_ids, ids = cut(name, kind)
        whole = read(name, prompt_ids, ids)
        for end in range(0, len(ids), 13):
            message = read(name, prompt_ids, ids[:end])
            calls = message.get("tool_calls") or []
            assert calls == (whole.get("tool_calls") or [])[: len(calls)]
            assert isinstance(message["content"], str) or calls


@EACH
def test_whatever_is_sampled_becomes_a_message(name):
    chance, of = random.Random(0), template(name)
    special = [*of.tokenizer.get_added_vocab().values()]
    for _ in range(10):
        ids = [chance.choice(special) if chance.random() < 0.4 else chance.randrange(256) for _ in range(20)]
        assert read(name, (), tuple(ids))["role"] == "assistant"


@EACH
def test_prompts_extend_within_a_cycle_of_tool_calls(name):
    of = template(name)
    kinds = [kind for kind in written_kinds(of) if kind.endswith("a call")]
    if name == "deepseekv3":
        kinds = ["thinking and a call"]  # Its prompts open a thought.
    for kind in kinds:
        one = ChatRequest((QUESTION,), (TOOL,))
        prompt_ids, ids = cut(name, kind)
        message = read(name, prompt_ids, ids)
        call = make_call(one, Completion(message, prompt_ids=prompt_ids, completion_ids=ids))
        result = {**RESULT, "tool_call_id": message["tool_calls"][0]["id"]}
        # The client keeps to itself what the model thought.
        sent = {field: value for field, value in message.items() if field != "reasoning_content"}
        prompt = of.prompt(ChatRequest((QUESTION, sent, result), (TOOL,), earlier=(call,)))
        if kind == "text and a call" and name in ("gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5"):
            assert prompt.drifted  # The template puts the tool's result between the call and the text.
        else:
            assert not prompt.fault
            assert prompt.ids[: len(prompt_ids + ids)] == prompt_ids + ids


def test_a_typed_out_tag_is_no_call():
    tag = '<tool_call>\n{"name": "probed_name", "arguments": {}}\n</tool_call>'
    of = template("qwen3")
    typed = tuple(of.rendering.encode(list(tag))[at][0] for at in range(len(tag)))
    assert of.decode(typed) == tag
    assert read("qwen3", (), typed) == {"role": "assistant", "content": tag}
    assert read("qwen3", (), of.rendering.encode([tag])[0])["tool_calls"]


def test_options_reach_the_template():
    of = template("qwen3")
    plain = ChatRequest((QUESTION,))
    silent = ChatRequest((QUESTION,), template_options={"enable_thinking": False})
    assert "<think>" not in of.decode(of.prompt(plain).ids)
    assert of.decode(of.prompt(silent).ids).endswith("<think>\n\n</think>\n\n")
    assert read("qwen3", of.prompt(silent).ids, of.rendering.encode(["3"])[0])["content"] == "3"
    effort = ChatRequest((QUESTION,), template_options={"reasoning_effort": "high"})
    assert "Reasoning: high" in template("gptoss").decode(template("gptoss").prompt(effort).ids)


def test_a_template_that_writes_todays_date_writes_the_same_on_all_days():
    for name, date in {"llama3_2": "Today Date: 26 Jul 2024\n", "gptoss": "date: 2024-07-26\n"}.items():
        assert date in template(name).decode(template(name).prompt(ChatRequest((QUESTION,))).ids)
    given = ChatRequest((QUESTION,), template_options={"date_string": "1 Jan 2030"})
    assert "Today Date: 1 Jan 2030\n" in template("llama3_2").decode(template("llama3_2").prompt(given).ids)


def test_an_effort_that_a_template_has_no_word_for_can_still_be_none():
    def prompt(name, effort):
        of = template(name)
        options = {"reasoning_effort": effort} if effort else {}
        return of.decode(of.prompt(ChatRequest((QUESTION,), template_options=options)).ids)

    assert prompt("qwen3", "high") == prompt("qwen3", None)
    assert prompt("qwen3", "none").endswith("<think>\n\n</think>\n\n")
    assert prompt("llama3_1", "none") == prompt("llama3_1", None)


def test_an_option_that_the_template_does_not_know_is_refused_by_name():
    request = ChatRequest((QUESTION,), template_options={"thinking_budget": 7})
    with pytest.raises(EngineError, match=r"has no option 'thinking_budget'.*enable_thinking"):
        template("qwen3").prompt(request)
    for own in ("messages", "add_generation_prompt", "tokenize", "bos_token"):
        with pytest.raises(EngineError, match="has no option"):
            template("llama3_1").prompt(ChatRequest((QUESTION,), template_options={own: "x"}))


RULES = st.lists(st.sampled_from(["system", "developer"]), max_size=2)
TURNS = st.tuples(RULES, st.sampled_from([["user"], ["user", "user"]]), RULES).map(
    lambda turn: [*chain(*turn)]
)
"""The roles of the messages between two answers; at least one is the user's."""
LATER = TURNS | st.lists(st.sampled_from(["system", "developer"]), min_size=1, max_size=2)


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
    assert FAMILIES[name].drifts or not play_shape(of, Shape("drawn", messages)).drift


@EACH
def test_coding_agents_speak_to_every_family(name):
    """As Codex and Claude Code do: two developer messages with tools, one of the system after a result."""
    of = template(name)
    rules = [{"role": "developer", "content": f"Rule {number}."} for number in (1, 2)]
    late = {"role": "system", "content": "A late rule."}
    text = of.decode(of.prompt(ChatRequest((*rules, QUESTION), (TOOL,))).ids)
    assert [text.count(each["content"]) for each in (*rules, QUESTION)] == [1, 1, 1]
    if "a call" in written_kinds(of):
        cycle = (*rules, QUESTION, PROBES["a call"], RESULT, late)
        text = of.decode(of.prompt(ChatRequest(cycle, (TOOL,))).ids)
        assert text.index("Rule 2.") < text.index(RESULT["content"]) < text.index("A late rule.")


def test_what_a_template_takes_is_left_as_it_is():
    """Elsewhere, too, a conversation is written by the template alone."""
    messages = [
        {"role": "system", "content": "One."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hi."},
        {"role": "system", "content": "Two."},
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
    with pytest.raises(ImpossibleCall, match=r"role 'tool' .* '4 degrees'") as error:
        make_template(knows_no_tools).rendering.text(messages, (), {}, ask=True)
    assert error.value.param == "messages"
