"""The `openai` package: chat completions, Responses, completions."""

from __future__ import annotations

import json
from typing import Any

from tests.clients.drive import ADD, QUESTION, Client, Sum, Target, add, catch, same

CLIENT = Client("openai")
ASK: list[Any] = [{"role": "user", "content": QUESTION}]
TOOLS: list[Any] = [{"type": "function", "function": ADD}]
FLAT_TOOLS: list[Any] = [{"type": "function", **ADD}]


def _sdk(target: Target, name: str = "OpenAI") -> Any:
    import openai

    return getattr(openai, name)(base_url=target.base_url, api_key=target.api_key)


def _create(target: Target, **options: Any) -> Any:
    return _sdk(target).chat.completions.create(**{"model": target.model, "messages": ASK, **options})


@CLIENT.feature(calls=2, extends=True)
def chat(target: Target) -> None:
    first = _create(target).choices[0].message
    assert first.content
    more = [*ASK, first, {"role": "user", "content": "Are you sure?"}]
    assert _create(target, messages=more).choices[0].message.content


@CLIENT.feature(calls=2, extends=True)
async def chat_stream(target: Target) -> None:
    async with _sdk(target, "AsyncOpenAI") as sdk:
        messages = list(ASK)
        for turn in range(2):
            stream = await sdk.chat.completions.create(
                model=target.model, messages=messages, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
            text = "".join(piece or "" for piece in pieces)
            assert len(list(filter(None, pieces))) > 1, "it comes as it is sampled"
            assert chunks[-1].usage.completion_tokens > 0, chunks
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"{turn}?"}]


@CLIENT.feature()
def bookkeeping(target: Target) -> None:
    nothing = {"user": "u", "store": True, "metadata": {"run": "1"}, "service_tier": "auto"}
    assert _create(target, **nothing, safety_identifier="s", prompt_cache_key="k").choices[0].message.content


@CLIENT.feature(calls=2)
def sampling(target: Target) -> None:
    penalties = {"frequency_penalty": 0.1, "presence_penalty": 0.1, "logit_bias": {"20": -100}}
    answer = _create(target, n=2, logprobs=True, seed=7, stop=["\n\n"], max_completion_tokens=12, **penalties)
    same([choice.index for choice in answer.choices], [0, 1])
    assert all(choice.logprobs.content for choice in answer.choices)


@CLIENT.feature(calls=2, extends=True)
def tools(target: Target) -> None:
    first = _create(target, tools=TOOLS).choices[0]
    same(first.finish_reason, "tool_calls")
    [call] = first.message.tool_calls
    result = str(add(**json.loads(call.function.arguments)))
    more = [*ASK, first.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    assert _create(target, messages=more, tools=TOOLS).choices[0].message.content


@CLIENT.feature(calls=3)
def tool_choice(target: Target) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        answer = _create(target, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
        [call] = answer.choices[0].message.tool_calls
        same(sorted(json.loads(call.function.arguments)), ["a", "b"])
    assert not _create(target, tools=TOOLS, tool_choice="none").choices[0].message.tool_calls


@CLIENT.feature()
def tools_stream(target: Target) -> None:
    with _sdk(target).chat.completions.stream(model=target.model, messages=ASK, tools=TOOLS) as stream:
        final = stream.get_final_completion()
    [call] = final.choices[0].message.tool_calls
    same(call.function.name, "add")


@CLIENT.feature()
def parse(target: Target) -> None:
    answer = _sdk(target).chat.completions.parse(model=target.model, messages=ASK, response_format=Sum)
    assert isinstance(answer.choices[0].message.parsed, Sum)


@CLIENT.feature()
async def parse_tool(target: Target) -> None:
    from openai import pydantic_function_tool

    async with _sdk(target, "AsyncOpenAI") as sdk:
        answer = await sdk.chat.completions.parse(
            model=target.model, messages=ASK, tools=[pydantic_function_tool(Sum)], tool_choice="required"
        )
    [call] = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Sum)


@CLIENT.feature()
def json_mode(target: Target) -> None:
    asked = [{"role": "user", "content": "Answer in JSON."}]
    answer = _create(target, messages=asked, response_format={"type": "json_object"})
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


@CLIENT.feature(calls=2, extends=True)
def responses(target: Target) -> None:
    sdk = _sdk(target)
    first = sdk.responses.create(model=target.model, input=QUESTION)
    assert first.output_text
    second = sdk.responses.create(model=target.model, input="Are you sure?", previous_response_id=first.id)
    assert second.output_text


@CLIENT.feature(calls=2, extends=True)
async def responses_tools(target: Target) -> None:
    async with _sdk(target, "AsyncOpenAI") as sdk:
        items: list[Any] = list(ASK)
        stream = await sdk.responses.create(model=target.model, input=items, tools=FLAT_TOOLS, stream=True)
        [done] = [event async for event in stream if event.type == "response.completed"]
        items += done.response.output
        for call in [item for item in done.response.output if item.type == "function_call"]:
            result = str(add(**json.loads(call.arguments)))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
        same(items[-1]["type"], "function_call_output")
        answer = await sdk.responses.create(model=target.model, input=items, tools=FLAT_TOOLS)
        assert answer.output_text


@CLIENT.feature(calls=2)
def responses_parse(target: Target) -> None:
    sdk = _sdk(target)
    answer = sdk.responses.parse(model=target.model, input=QUESTION, text_format=Sum)
    assert isinstance(answer.output_parsed, Sum)
    answer = sdk.responses.create(
        model=target.model, input=QUESTION, tools=FLAT_TOOLS, tool_choice="required"
    )
    same([item.type for item in answer.output], ["function_call"])


@CLIENT.feature()
def completions(target: Target) -> None:
    answer = _sdk(target).completions.create(model=target.model, prompt=QUESTION, max_tokens=4)
    assert answer.usage.completion_tokens


@CLIENT.feature()
def scores(target: Target) -> None:
    answer = _sdk(target).completions.create(model=target.model, prompt=QUESTION, max_tokens=2, logprobs=1)
    choice = answer.choices[0]
    same(len(choice.logprobs.token_logprobs), answer.usage.completion_tokens)


@CLIENT.feature(calls=0)
def models(target: Target) -> None:
    assert [model.id for model in _sdk(target).models.list()]


@CLIENT.feature(calls=0)
def refusals(target: Target) -> None:
    import openai

    embed = _sdk(target).embeddings.create
    error = catch(openai.NotFoundError, lambda: embed(model=target.model, input="x"))
    assert "embeddings" in error.message, error
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    shown = [{"role": "user", "content": [picture]}]
    error = catch(openai.BadRequestError, lambda: _create(target, messages=shown))
    assert "text only" in error.message, error
