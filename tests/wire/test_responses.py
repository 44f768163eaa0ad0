"""The Responses API of a recorded model, spoken by the real `openai` client."""

from __future__ import annotations

import openai
import pytest
from openai.types.responses import Response

from etude.core.call import Constraint
from etude.wire.gateway import recording_client
from tests.wire.dialects import ASK, CALLING, Scripted, completion

ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}}


async def test_a_text_is_a_user_message_and_the_answer_a_response():
    handler = Scripted("hello")
    response = await recording_client(handler).responses.create(
        model="m", input="hi", instructions="Be brief.", temperature=0.5, top_p=0.9, max_output_tokens=7
    )
    assert response.output_text == "hello"
    assert (response.id, response.status, response.model) == ("resp_1", "completed", "policy")
    assert (response.usage.input_tokens, response.usage.output_tokens) == (5, 2)
    Response.model_validate(response.model_dump())
    (asked,) = handler.asked
    assert asked.messages == ({"role": "system", "content": "Be brief."}, *ASK)
    assert asked.sampling == {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7}


async def test_a_response_can_be_gone_on_from_by_its_id():
    handler = Scripted("one", "two", "three")
    client = recording_client(handler)
    first = await client.responses.create(model="m", input="1", instructions="Only now.")
    second = await client.responses.create(model="m", input="2", previous_response_id=first.id)
    await client.responses.create(model="m", input="3", previous_response_id=second.id)
    assert [message["content"] for message in handler.asked[2].messages] == ["1", "one", "2", "two", "3"]
    with pytest.raises(openai.BadRequestError, match="is not known here"):
        await client.responses.create(model="m", input="2", previous_response_id="resp_x")


async def test_a_response_that_is_not_to_be_stored_is_not_known_later():
    client = recording_client(Scripted("hello"))
    response = await client.responses.create(model="m", input="hi", store=False)
    assert response.output_text == "hello" and response.store is False
    with pytest.raises(openai.BadRequestError, match="is not known here"):
        await client.responses.create(model="m", input="what?", previous_response_id=response.id)


async def test_an_answer_that_was_cut_is_incomplete():
    handler = Scripted(completion("hel", finish_reason="length"))
    response = await recording_client(handler).responses.create(model="m", input="hi")
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"


async def test_logprobs_are_told_when_they_are_included():
    handler = Scripted(completion("ab", completion_ids=(7, 8), logprobs=(-0.5, -1.0)))
    response = await recording_client(handler).responses.create(
        model="m", input="hi", include=["message.output_text.logprobs"]
    )
    found = response.output[0].content[0].logprobs
    assert [(one.token, one.logprob) for one in found] == [("token_id:7", -0.5), ("token_id:8", -1.0)]


@pytest.mark.parametrize(
    ("request_fields", "message"),
    [
        ({"input": "hi", "tool_choice": "required"}, "there are no tools to call"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "3"}]},
            "the id of a tool call of an earlier",
        ),
        ({"input": "hi", "conversation": "conv_1"}, "parameter 'conversation' is not supported"),
        ({"input": []}, "at least one message"),
    ],
)
async def test_what_cannot_be_honoured_is_refused(request_fields, message):
    handler = Scripted("x")
    with pytest.raises(openai.BadRequestError, match=message):
        await recording_client(handler).post(
            "/responses", body={"model": "m", **request_fields}, cast_to=object
        )
    assert handler.asked == []


async def test_thoughts_come_and_go_back_as_items():
    thought = CALLING | {"reasoning_content": "1 + 2"}
    handler = Scripted(thought, "x")
    client = recording_client(handler)
    response = await client.responses.create(model="m", input=ASK, tools=[ADD])
    assert [item.type for item in response.output] == ["reasoning", "function_call"]
    assert response.output[0].content[0].text == "1 + 2"
    Response.model_validate(response.model_dump())
    for output in (response.output, response.output[1:]):
        await client.responses.create(model="m", input=[*ASK, *output, *ASK], tools=[ADD])
        assert handler.asked[-1].messages == (*ASK, thought, *ASK)
    empty = {"type": "reasoning", "id": "rs_1", "summary": []}
    await client.responses.create(model="m", input=[*ASK, empty, *ASK])
    assert handler.asked[-1].messages == (*ASK, *ASK)


async def test_the_form_of_the_answer_is_that_of_a_chat():
    handler = Scripted("{}")
    await recording_client(handler).responses.create(
        model="m",
        input="hi",
        tools=[ADD],
        tool_choice={"type": "function", "name": "add"},
        parallel_tool_calls=False,
        reasoning={"effort": "low", "summary": "auto"},
        text={
            "verbosity": "low",
            "format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}},
        },
    )
    (asked,) = handler.asked
    assert (asked.tool_choice, asked.parallel_tool_calls) == ("function:add", False)
    assert asked.template_options == {"reasoning_effort": "low"}
    assert asked.sampling == {"constraint": Constraint("json_schema", '{"type": "object"}')}


FIND = {"type": "function", "name": "find", "parameters": {"type": "object", "properties": {}}}
FILES = {"type": "namespace", "name": "files", "description": "Of files.", "tools": [FIND]}
"""As Codex offers its tools for sub-agents."""


@pytest.mark.parametrize("stream", [False, True])
async def test_a_function_of_a_namespace_is_called_by_both_names(stream):
    call = {"id": "call_1", "type": "function", "function": {"name": "files__find", "arguments": "{}"}}
    handler = Scripted({"role": "assistant", "content": None, "tool_calls": [call]}, "Found.")
    client, fields = recording_client(handler), {"model": "m", "tools": [FILES]}
    if stream:
        events = [event async for event in await client.responses.create(input=ASK, stream=True, **fields)]
        added = [event.item for event in events if event.type == "response.output_item.added"]
        assert [(item.name, item.namespace) for item in added] == [("find", "files")]
        first = events[-1].response
    else:
        first = await client.responses.create(input=ASK, **fields)
    (item,) = first.output
    assert (item.name, item.namespace, item.arguments) == ("find", "files", "{}")
    result = {"type": "function_call_output", "call_id": "call_1", "output": "a.txt"}
    more = [*ASK, item.model_dump(), result]
    assert (await client.responses.create(input=more, **fields)).output_text == "Found."
    asked, later = handler.asked
    assert [tool["function"]["name"] for tool in asked.tools] == ["files__find"]
    assert later.messages[1]["tool_calls"] == [call]
