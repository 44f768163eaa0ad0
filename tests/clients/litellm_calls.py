"""LiteLLM: its calls of OpenAI-compatible servers."""

from __future__ import annotations

import json
from typing import Any

from tests.clients.drive import ADD, QUESTION, Client, Sum, Target, add, same

CLIENT = Client("LiteLLM", "litellm", {})
ASK: list[Any] = [{"role": "user", "content": QUESTION}]
TOOLS: list[Any] = [{"type": "function", "function": ADD}]


def _at(target: Target) -> dict[str, Any]:
    return {
        "model": f"openai/{target.model}",
        "api_base": target.base_url,
        "api_key": target.api_key,
        "num_retries": 0,
    }


@CLIENT.feature("`completion`, two turns", calls=2, extends=True)
def completion(target: Target) -> None:
    import litellm

    first = litellm.completion(messages=ASK, **_at(target)).choices[0].message
    more = [*ASK, first.model_dump(), {"role": "user", "content": "Are you sure?"}]
    assert litellm.completion(messages=more, **_at(target)).choices[0].message.content


@CLIENT.feature("`acompletion` as a stream")
async def stream(target: Target) -> None:
    import litellm

    pieces = await litellm.acompletion(messages=ASK, stream=True, **_at(target))
    assert "".join([piece.choices[0].delta.content or "" async for piece in pieces])


@CLIENT.feature("tools", calls=2, extends=True)
def tools(target: Target) -> None:
    import litellm

    message = litellm.completion(messages=ASK, tools=TOOLS, **_at(target)).choices[0].message
    [call] = message.tool_calls
    result = str(add(**json.loads(call.function.arguments)))
    more = [*ASK, message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    assert litellm.completion(messages=more, tools=TOOLS, **_at(target)).choices[0].message.content


@CLIENT.feature('`tool_choice="required"`; `response_format` of a pydantic model', calls=2)
def forms(target: Target) -> None:
    import litellm

    answer = litellm.completion(messages=ASK, tools=TOOLS, tool_choice="required", **_at(target))
    same(answer.choices[0].message.tool_calls[0].function.name, "add")
    answer = litellm.completion(messages=ASK, response_format=Sum, **_at(target))
    assert Sum.model_validate_json(answer.choices[0].message.content)


@CLIENT.feature("`responses`, `aresponses`", calls=2)
async def responses(target: Target) -> None:
    import litellm

    answer = litellm.responses(input=QUESTION, **_at(target))
    assert answer.output[0].content[0].text
    answer = await litellm.aresponses(input=QUESTION, **_at(target))
    assert answer.output[0].content[0].text


@CLIENT.feature("`anthropic/` models (Messages)")
def messages(target: Target) -> None:
    import litellm

    at = _at(target) | {"model": f"anthropic/{target.model}", "api_base": target.anthropic_url}
    assert litellm.completion(messages=ASK, **at).choices[0].message.content
