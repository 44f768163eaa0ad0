"""LiteLLM: its calls of OpenAI-compatible servers."""

from __future__ import annotations

import json
from typing import Any

from tests.clients.drive import ADD, QUESTION, Client, Sum, Target, add, same

CLIENT = Client("LiteLLM", "litellm", {})
ASK: list[Any] = [{"role": "user", "content": QUESTION}]
TOOLS: list[Any] = [{"type": "function", "function": ADD}]


def _call(target: Target, name: str = "completion", **options: Any) -> Any:
    """A function of the package, called."""
    import litellm

    at = {"model": f"openai/{target.model}", "api_base": target.base_url, "api_key": target.api_key}
    return getattr(litellm, name)(**{**at, "num_retries": 0, **options})


def _message(target: Target, **options: Any) -> Any:
    return _call(target, **{"messages": ASK, **options}).choices[0].message


@CLIENT.feature("`completion`, two turns", calls=2, extends=True)
def completion(target: Target) -> None:
    more = [*ASK, _message(target).model_dump(), {"role": "user", "content": "Are you sure?"}]
    assert _message(target, messages=more).content


@CLIENT.feature("`acompletion` as a stream")
async def stream(target: Target) -> None:
    pieces = await _call(target, "acompletion", messages=ASK, stream=True)
    assert "".join([piece.choices[0].delta.content or "" async for piece in pieces])


@CLIENT.feature("tools", calls=2, extends=True)
def tools(target: Target) -> None:
    message = _message(target, tools=TOOLS)
    [call] = message.tool_calls
    result = str(add(**json.loads(call.function.arguments)))
    more = [*ASK, message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    assert _message(target, messages=more, tools=TOOLS).content


@CLIENT.feature('`tool_choice="required"`; `response_format` of a pydantic model', calls=2)
def forms(target: Target) -> None:
    message = _message(target, tools=TOOLS, tool_choice="required")
    same(message.tool_calls[0].function.name, "add")
    assert Sum.model_validate_json(_message(target, response_format=Sum).content)


@CLIENT.feature("`responses`, `aresponses`", calls=2)
async def responses(target: Target) -> None:
    assert _call(target, "responses", input=QUESTION).output[0].content[0].text
    assert (await _call(target, "aresponses", input=QUESTION)).output[0].content[0].text


@CLIENT.feature("`anthropic/` models (Messages)")
def messages(target: Target) -> None:
    at = {"model": f"anthropic/{target.model}", "api_base": target.anthropic_url}
    assert _message(target, **at).content
