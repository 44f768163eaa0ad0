"""A conversation's tokens are kept and extended; only what is new is rendered and tokenised."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.core.call import ChatRequest, Completion
from etude.core.errors import EngineError, RequestError
from etude.engines.answer import parse_message
from etude.models.template import ChatTemplate
from tests.models.tiny_models import CALCULATOR, CHATML, FORGETFUL, SEALED, make_call, says, tokenizer, user
from tests.support import draws

TINY, QWEN = None, CHATML
STYLES = pytest.mark.parametrize("style", [TINY, QWEN, SEALED], ids=["tiny", "chatml", "sealed"])


def make_template(style):
    words = tokenizer(style)
    end = "<|end|>" if style is None else "<|im_end|>"
    return ChatTemplate(words, frozenset({words.eos_token_id, words.convert_tokens_to_ids(end)}))


def end_token(style):
    return tokenizer(style).convert_tokens_to_ids("<|end|>" if style is None else "<|im_end|>")


def encode(style, text):
    return tuple(tokenizer(style)(text, add_special_tokens=False)["input_ids"])


def clumsy(style, text):
    """The text in as many tokens as possible, as a policy may sample it and no tokenizer would."""
    return tuple(token for character in text for token in encode(style, character))


def turn(template, style, messages, reply, *, earlier=(), tools=(), cut=False):
    """A call: the template's prompt, and a reply in unusual tokens, cut short or ended."""
    request = ChatRequest(tuple(messages), tuple(tools), earlier=tuple(earlier))
    prompt = template.prompt(request)
    ids = clumsy(style, reply) + (() if cut else (end_token(style),))
    message = parse_message(template, request, reply, prompt.ids)
    return prompt, make_call(request, Completion(message, prompt_ids=prompt.ids, completion_ids=ids))


@STYLES
def test_a_prompt_extends_what_was_sampled_over_turns_with_tools(style):
    template = make_template(style)
    question = user("what is 1 plus 2?")
    call = '<tool_call>{"name": "calculator", "arguments": {"b": 2, "a": 1}}</tool_call>'
    _, one = turn(template, style, [question], call, tools=[CALCULATOR])
    result = {"role": "tool", "tool_call_id": "call00000", "content": "3"}
    history = [question, one.completion.message, result]
    second, two = turn(template, style, history, "it is 3.", earlier=[one], tools=[CALCULATOR])
    history += [two.completion.message, user("plus 4?")]
    third, _ = turn(template, style, history, "7", earlier=[one, two], tools=[CALCULATOR])
    for before, after in ((one, second), (two, third)):
        sequence = before.completion.prompt_ids + before.completion.completion_ids
        assert after.ids[: len(sequence)] == sequence
        assert not after.drifted
    whole = tokenizer(style).apply_chat_template(
        [question, _with_objects(one.completion.message), result, *history[3:]],
        tools=[CALCULATOR],
        add_generation_prompt=True,
        tokenize=False,
    )
    # The same text but for the arguments, which stand as they were sampled.
    rendered = json.dumps({"name": "calculator", "arguments": {"b": 2, "a": 1}})
    text = tokenizer(style).decode(third.ids)
    assert text.split("<tool_call>")[0] == whole.split("<tool_call>")[0]
    assert text.split("</tool_call>")[1] == whole.split("</tool_call>")[1].lstrip("\n")
    assert rendered in text


def _with_objects(message):
    calls = [
        {"function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


@STYLES
def test_a_reply_that_was_cut_is_closed_by_the_templates_own_end_of_turn(style):
    template = make_template(style)
    _, one = turn(template, style, [user("a")], "it is", cut=True)
    following, _ = turn(template, style, [user("a"), says("it is"), user("b")], "c", earlier=[one])
    sequence = one.completion.prompt_ids + one.completion.completion_ids
    assert following.ids[: len(sequence) + 1] == (*sequence, end_token(style))
    whole = tokenizer(style).apply_chat_template(
        [user("a"), says("it is"), user("b")], add_generation_prompt=True, tokenize=False
    )
    assert tokenizer(style).decode(following.ids) == whole


@STYLES
def test_a_reply_in_the_usual_tokens_makes_the_prompt_that_the_template_renders(style):
    template = make_template(style)
    request = ChatRequest((user("a"),))
    completion = Completion(
        says("it is 3."),
        prompt_ids=template.prompt(request).ids,
        completion_ids=(*encode(style, "it is 3."), end_token(style)),
    )
    messages = (user("a"), says("it is 3."), user("b"))
    extended = template.prompt(ChatRequest(messages, earlier=(make_call(request, completion),)))
    assert extended.ids == template.prompt(ChatRequest(messages)).ids


def test_the_longest_conversation_is_extended_and_not_the_latest_call():
    template = make_template(TINY)
    _, one = turn(template, TINY, [user("a")], "b")
    _, two = turn(template, TINY, [user("a"), says("b"), user("c")], "d", earlier=[one])
    _, again = turn(template, TINY, [user("a")], "b", earlier=[one, two])
    history = [user("a"), says("b"), user("c"), says("d"), user("e")]
    prompt, _ = turn(template, TINY, history, "f", earlier=[one, two, again])
    sequence = two.completion.prompt_ids + two.completion.completion_ids
    assert prompt.ids[: len(sequence)] == sequence


def test_a_client_may_drop_and_renumber_ids_and_empty_fields():
    template = make_template(TINY)
    text = '<tool_call>{"name": "calculator", "arguments": {}}</tool_call>'
    _, one = turn(template, TINY, [user("a")], text, tools=[CALCULATOR])
    call = one.completion.message["tool_calls"][0]
    theirs = {"role": "assistant", "tool_calls": [{**call, "id": "other"}], "refusal": None}
    prompt, _ = turn(template, TINY, [user("a"), theirs, user("b")], "c", earlier=[one], tools=[CALCULATOR])
    sequence = one.completion.prompt_ids + one.completion.completion_ids
    assert prompt.ids[: len(sequence)] == sequence


def test_a_template_that_drops_earlier_thoughts_makes_a_new_prompt_on_purpose():
    template = make_template(FORGETFUL)
    _, one = turn(template, FORGETFUL, [user("a")], "<think>hm</think>it is 3.")
    assert one.completion.message == says("it is 3.") | {"reasoning_content": "hm"}
    prompt, _ = turn(template, FORGETFUL, [user("a"), says("it is 3."), user("b")], "c", earlier=[one])
    assert not prompt.drifted
    assert re.fullmatch("role assistant: .* thinking .*", prompt.fault or "")
    assert "hm" not in tokenizer(FORGETFUL).decode(prompt.ids)
    unthinking, _ = turn(template, FORGETFUL, [user("a")], "it is 3.")
    assert not unthinking.drifted


def test_other_tools_than_before_are_shown_to_the_model_and_count_as_drift():
    template = make_template(CHATML)
    _, one = turn(template, CHATML, [user("a")], "b", tools=[CALCULATOR])
    prompt, _ = turn(template, CHATML, [user("a"), says("b"), user("c")], "d", earlier=[one])
    assert prompt.drifted
    assert (prompt.fault or "").startswith("tools: ")
    assert "calculator" not in tokenizer(CHATML).decode(prompt.ids)


texts = st.text("ab 1<|>é\n", max_size=5)
exchanges = st.lists(st.tuples(texts, texts), min_size=1, max_size=4)


@STYLES
@given(exchanges=exchanges, system=st.none() | texts)
@settings(max_examples=draws(10), deadline=None)
def test_a_transcript_is_what_prompts_and_completions_make_turn_by_turn(style, exchanges, system):
    template = make_template(style)
    messages = [] if system is None else [{"role": "system", "content": system}]
    calls = []
    for question, reply in exchanges:
        messages.append(user(question))
        request = ChatRequest(tuple(messages), earlier=tuple(calls))
        prompt = template.prompt(request)
        assert not prompt.drifted
        completion = Completion(
            says(reply), prompt_ids=prompt.ids, completion_ids=(*encode(style, reply), end_token(style))
        )
        calls.append(make_call(request, completion, len(calls)))
        messages.append(says(reply))
    ids, sampled = template.transcript(messages)
    assert ids == calls[-1].completion.prompt_ids + calls[-1].completion.completion_ids
    spoken = [token for call in calls for token in call.completion.completion_ids]
    assert [token for token, chosen in zip(ids, sampled, strict=True) if chosen] == spoken


def test_a_transcript_that_the_template_would_rewrite_is_refused():
    thought = says("<think>hm</think>it is 3.")
    with pytest.raises(RequestError, match="conversation at message 4"):
        make_template(FORGETFUL).transcript([user("a"), thought, user("b"), says("c")])


def test_content_in_parts_is_shown_as_its_text():
    template = make_template(TINY)
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert template.prompt(ChatRequest((parts,))) == template.prompt(ChatRequest((user("ab"),)))
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    with pytest.raises(EngineError, match="takes text only"):
        template.prompt(ChatRequest((image,)))


@pytest.mark.parametrize("refusal", ["raise_exception('no system messages')", "range(10 ** 9)", "1 // 0"])
def test_messages_that_the_template_refuses_are_named(refusal):
    words = tokenizer("{{ " + refusal + " }}<|im_end|>")
    template = ChatTemplate(words, frozenset({words.eos_token_id}))
    with pytest.raises(EngineError, match=r"refused the messages.*Error: .*\['user'\]"):
        template.prompt(ChatRequest((user("a"),)))


def test_a_tokenizer_without_a_template_is_refused():
    words = tokenizer("x")
    words.chat_template = None
    with pytest.raises(RequestError, match="no chat template"):
        ChatTemplate(words, frozenset({1}))
