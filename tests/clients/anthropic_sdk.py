"""The `anthropic` package: messages."""

from __future__ import annotations

from typing import Any

from tests.clients.drive import ADD, QUESTION, Client, Sum, Target, add, catch, same

CLIENT = Client("anthropic")
ASK: list[Any] = [{"role": "user", "content": QUESTION}]
TOOLS: list[Any] = [{"name": "add", "description": "Add.", "input_schema": ADD["parameters"]}]


def _sdk(target: Target, name: str = "Anthropic") -> Any:
    import anthropic

    return getattr(anthropic, name)(base_url=target.anthropic_url, api_key=target.api_key)


def _create(target: Target, **options: Any) -> Any:
    asked = {"model": target.model, "max_tokens": 64, "messages": ASK, **options}
    return _sdk(target).messages.create(**asked)


def _tool_use(answer: Any) -> Any:
    """The one call of a tool."""
    [use] = [block for block in answer.content if block.type == "tool_use"]
    return use


@CLIENT.feature(calls=2, extends=True)
def messages(target: Target) -> None:
    first = _create(target, system="You add.")
    assert first.content[0].text
    more = [*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": "Sure?"}]
    same(_create(target, messages=more, system="You add.").stop_reason, "end_turn")


@CLIENT.feature()
async def stream(target: Target) -> None:
    async with (
        _sdk(target, "AsyncAnthropic") as sdk,
        sdk.messages.stream(model=target.model, max_tokens=64, messages=ASK) as streamed,
    ):
        pieces = [piece async for piece in streamed.text_stream]
        final = await streamed.get_final_message()
    assert len(pieces) > 1, "it comes as it is sampled"
    assert "".join(pieces) == final.content[0].text and final.usage.output_tokens, final


@CLIENT.feature(calls=2, extends=True)
def tools(target: Target) -> None:
    first = _create(target, tools=TOOLS)
    same(first.stop_reason, "tool_use")
    use = _tool_use(first)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": str(add(**use.input))}
    more = [*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    assert _create(target, messages=more, tools=TOOLS).content[0].text


@CLIENT.feature()
def tools_stream(target: Target) -> None:
    asked = {"model": target.model, "max_tokens": 64, "messages": ASK, "tools": TOOLS}
    with _sdk(target).messages.stream(**asked) as streamed:
        same(_tool_use(streamed.get_final_message()).input, {"a": 1, "b": 2})


@CLIENT.feature(calls=3)
def tool_choice(target: Target) -> None:
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "add"}):
        same(sorted(_tool_use(_create(target, tools=TOOLS, tool_choice=choice)).input), ["a", "b"])
    answer = _create(target, tools=TOOLS, tool_choice={"type": "none"})
    same([block.type for block in answer.content], ["text"])


@CLIENT.feature()
def parse(target: Target) -> None:
    answer = _sdk(target).messages.parse(model=target.model, max_tokens=64, messages=ASK, output_format=Sum)
    assert isinstance(answer.parsed_output, Sum)


@CLIENT.feature()
def count_tokens(target: Target) -> None:
    counted = _sdk(target).messages.count_tokens(model=target.model, messages=ASK, tools=TOOLS)
    same(counted.input_tokens, _create(target, tools=TOOLS).usage.input_tokens)


@CLIENT.feature(calls=2, extends=True)
def tool_runner(target: Target) -> None:
    from anthropic import beta_tool

    runner = _sdk(target).beta.messages.tool_runner(
        model=target.model, max_tokens=64, messages=ASK, tools=[beta_tool(_add)]
    )
    assert runner.until_done().content[0].text


def _add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return str(a + b)


_add.__name__ = "add"


@CLIENT.feature()
def sampling(target: Target) -> None:
    more = {"temperature": 0.5, "top_k": 20, "top_p": 0.9}
    answer = _create(target, stop_sequences=["3"], metadata={"user_id": "u"}, extra_body=more)
    assert answer.content[0].text, answer


@CLIENT.feature(calls=0)
def errors(target: Target) -> None:
    import anthropic

    error = catch(anthropic.BadRequestError, lambda: _create(target, extra_body={"colour": "red"}))
    same(error.body["error"]["type"], "invalid_request_error")
    assert "colour" in error.message, error
