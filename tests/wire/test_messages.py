"""Anthropic's messages and OpenAI's Responses of a recorded model, spoken by the real clients."""

import anthropic
import openai
import pytest
from anthropic.types import Message
from openai.types.responses import Response

from etude.core.call import Completion, Delta
from etude.wire.dialect import AnswerHeader, AnswerMemory, ChatBody
from etude.wire.gateway import recording_client
from etude.wire.http_server import Endpoint, EndpointServer
from etude.wire.responses import ResponsesDialect
from tests.wire.dialects import ASK, CALLING, TOOL_CALL, Scripted, anthropic_client, completion

ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}


async def ask(server: EndpointServer, handler: Scripted, **fields):
    async with anthropic_client(server.open(handler)) as connected:
        return await connected.messages.create(**{"model": "m", "max_tokens": 9, "messages": ASK, **fields})


async def test_a_message_is_a_chat_completion(server):
    handler = Scripted("hello")
    extra = {"x-etude-function": "search"}
    message = await ask(
        server,
        handler,
        system="Be brief.",
        stop_sequences=["\n"],
        # The client knows these two no more, and other agents still send them.
        extra_body={"temperature": 0.5, "top_p": 0.9},
        extra_headers=extra,
    )
    assert [block.text for block in message.content] == ["hello"]
    assert (message.id, message.model, message.stop_reason) == ("msg_1", "policy", "end_turn")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (5, 2)
    Message.model_validate(message.model_dump())
    (asked,) = handler.asked
    assert asked.messages == ({"role": "system", "content": "Be brief."}, *ASK)
    assert asked.sampling == {"temperature": 0.5, "top_p": 0.9, "max_tokens": 9, "stop": ("\n",)}
    assert asked.function == "search"


async def test_what_the_assistant_said_elsewhere_is_translated(server):
    handler = Scripted("x")
    use = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
    said = [{"type": "text", "text": "Hm."}, {"type": "thinking", "thinking": "…", "signature": "s"}, use]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "3"}]}
    answered = {"role": "user", "content": [result, {"type": "text", "text": "go on"}]}
    so = {"role": "assistant", "content": "So."}
    messages = [*ASK, {"role": "assistant", "content": said}, answered, so, *ASK]
    await ask(server, handler, messages=messages, tools=[ADD])
    function = {"name": "add", "arguments": '{"a": 1}'}
    call = {"id": "t1", "type": "function", "function": function}
    assert handler.asked[0].messages == (
        *ASK,
        {"role": "assistant", "content": "Hm.", "reasoning_content": "…", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "3"},
        {"role": "user", "content": "go on"},
        so,
        *ASK,
    )
    offered = {"name": "add", "parameters": {"type": "object"}, "description": "Adds."}
    assert handler.asked[0].tools == ({"type": "function", "function": offered},)


async def test_a_thread_is_refused_so_that_the_sdk_sends_whole_conversations(server):
    with pytest.raises(anthropic.BadRequestError, match="parameter 'thread' is not supported") as raised:
        await ask(server, Scripted("hello"), extra_body={"thread": {"type": "create"}})
    assert raised.value.body["error"]["details"] == {"error_code": "thread_unsupported_request"}


async def test_what_claude_code_sends_by_default_leaves_thinking_to_the_model(server):
    handler = Scripted("3")
    kept = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    await ask(server, handler, thinking={"type": "adaptive"}, extra_body={"context_management": kept})
    await ask(server, handler, thinking={"type": "disabled"})
    assert [dict(asked.template_options) for asked in handler.asked] == [{}, {"enable_thinking": False}]


async def test_thoughts_come_as_blocks_and_are_known_when_they_are_sent_back(server):
    thought = {"role": "assistant", "content": "3", "reasoning_content": "1 + 2"}
    handler = Scripted(thought)
    async with anthropic_client(server.open(handler)) as connected:
        fields = {"model": "m", "max_tokens": 9, "thinking": {"type": "adaptive", "display": "omitted"}}
        whole = await connected.messages.create(messages=ASK, **fields)
        async with connected.messages.stream(messages=ASK, **fields) as stream:
            streamed = await stream.get_final_message()
        for message in (whole, streamed):
            assert [getattr(block, "thinking", block.type) for block in message.content] == ["1 + 2", "text"]
        for sent in (whole.content, whole.content[1:]):
            later = [*ASK, {"role": "assistant", "content": sent}, *ASK]
            await connected.messages.create(messages=later, **fields)
            assert handler.asked[-1].messages == (*ASK, thought, *ASK)


def test_the_environment_is_that_of_both_sdks():
    found = Endpoint("http://127.0.0.1:1/v1", "key").environment
    assert found == {
        "OPENAI_BASE_URL": "http://127.0.0.1:1/v1",
        "OPENAI_API_KEY": "key",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:1",
        "ANTHROPIC_API_KEY": "key",
    }


ADD_TOOL = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}}


async def test_a_response_that_is_not_to_be_stored_is_not_known_later():
    client = recording_client(Scripted("hello"))
    response = await client.responses.create(model="m", input="hi", store=False)
    assert response.output_text == "hello" and response.store is False
    with pytest.raises(openai.BadRequestError, match=f"previous_response_id .*{response.id}"):
        await client.responses.create(model="m", input="what?", previous_response_id=response.id)


async def test_an_answer_that_was_cut_is_incomplete():
    handler = Scripted(completion("hel", finish_reason="length"))
    response = await recording_client(handler).responses.create(model="m", input="hi")
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"


AB = [Delta("a", "", (1,), (-0.1,)), Delta("b", "", (2,), (-0.2,))]


@pytest.mark.parametrize(
    ("message", "reason", "pieces"),
    [
        ({"content": "ab"}, "stop", AB),
        ({"content": "ab"}, "length", AB),
        ({"content": "ab", "tool_calls": [TOOL_CALL]}, "tool_calls", AB),
        ({"content": "ab", "reasoning_content": "hm"}, "length", []),
        ({"content": "", "reasoning_content": "ab"}, "length", [Delta("", "ab", (1, 2), (-0.1, -0.2))]),
        ({"content": ""}, "stop", []),
    ],
)
def test_a_streamed_response_has_the_items_of_a_plain_one(message, reason, pieces):
    asked = ChatBody("m", ())
    heading = AnswerHeader("chatcmpl-1", "policy")
    answer = heading.with_completion(
        Completion({"role": "assistant", **message}, reason, completion_ids=(1, 2, 3))
    )
    dialect = ResponsesDialect(AnswerMemory())
    stream = dialect.stream(asked)
    events = [event for piece in pieces for _, event in stream.add(0, heading, piece)]
    events += [event for _, event in stream.add(0, answer, Delta())]
    output = dialect.reply([answer], asked)["output"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == output


async def test_thoughts_come_and_go_back_as_items():
    thought = CALLING | {"reasoning_content": "1 + 2"}
    handler = Scripted(thought, "x")
    client = recording_client(handler)
    response = await client.responses.create(model="m", input=ASK, tools=[ADD_TOOL])
    assert [item.type for item in response.output] == ["reasoning", "function_call"]
    assert response.output[0].content[0].text == "1 + 2"
    Response.model_validate(response.model_dump())
    for output in (response.output, response.output[1:]):
        await client.responses.create(model="m", input=[*ASK, *output, *ASK], tools=[ADD_TOOL])
        assert handler.asked[-1].messages == (*ASK, thought, *ASK)
    empty = {"type": "reasoning", "id": "rs_1", "summary": []}
    await client.responses.create(model="m", input=[*ASK, empty, *ASK])
    assert handler.asked[-1].messages == (*ASK, *ASK)


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
