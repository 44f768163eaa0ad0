"""The text around a tool call is read off the chat template, whatever its syntax."""

from __future__ import annotations

import json

import pytest

from etude.core.call import ChatRequest
from etude.models.probe import ARGUMENTS, call_form
from tests.models.test_template import template_of
from tests.models.tiny_models import CALCULATOR, CHATML, FORGETFUL, user

WRITTEN = json.dumps(ARGUMENTS)


def test_a_template_is_asked_how_it_writes_calls():
    form = template_of(CHATML).call_form
    assert form.prefix == '<tool_call>\n{"name": "'
    assert (form.between, form.suffix) == ('", "arguments": ', "}\n</tool_call>")
    assert form.separator == '}\n</tool_call><tool_call>\n{"name": "'


@pytest.mark.parametrize("style", [None, CHATML, FORGETFUL], ids=["tiny", "chatml", "forgetful"])
def test_calls_that_are_written_in_the_form_are_read_as_calls(style):
    template = template_of(style)
    written = template.call_form.write(("calculator", '{"a": 1}'), ("calculator", "{}"))
    calls = template.parse(written, [CALCULATOR])["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == ['{"a": 1}', "{}"]


def test_the_form_goes_on_where_the_prompt_ends():
    template = template_of(CHATML)
    prompt = template.decode(template.prompt(ChatRequest((user("a"),), (CALCULATOR,))).ids)
    call = {"type": "function", "function": {"name": "calculator", "arguments": '{"a": 1}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    ids, _ = template.transcript([user("a"), answer], [CALCULATOR])
    written = template.call_form.write(("calculator", '{"a": 1}'))
    assert template.decode(ids) == f"{prompt}{written}<|im_end|>"


def test_arguments_that_are_not_json_have_no_form():
    assert call_form("<function=probed_name><parameter=probed_key>probed value</parameter>", None) is None
    assert call_form("[probed_name(probed_key='probed value')]", None) is None
    assert template_of("{{ messages[-1].content }}<|im_end|>").call_form is None


def test_a_family_with_one_call_an_answer_has_no_separator():
    form = call_form(f'{{"name": "probed_name", "parameters": {WRITTEN}}}', None)
    assert (form.prefix, form.between, form.suffix, form.separator) == (
        '{"name": "',
        '", "parameters": ',
        "}",
        None,
    )
    with pytest.raises(ValueError, match="one tool call an answer"):
        form.write(("a", "{}"), ("b", "{}"))


def test_a_template_that_writes_arguments_as_they_are_gets_them_as_text():
    style = CHATML.replace("{{ call.function.arguments | tojson }}", "{{ '' + call.function.arguments }}")
    assert style != CHATML
    assert template_of(style).call_form == template_of(CHATML).call_form
    as_they_print = CHATML.replace("call.function.arguments | tojson", "call.function.arguments")
    assert template_of(as_they_print).call_form == template_of(CHATML).call_form
