from __future__ import annotations

from typing import Literal

import pydantic
import pytest

from etude.core.errors import RequestError
from etude.rollout.reply import ToolCall, describe_tools


class Place(pydantic.BaseModel):
    city: str


def search(
    query: str, limit: int = 3, order: Literal["new", "old"] = "new", near: Place | None = None
) -> str:
    """Search the archive.

    It is large.

    Args:
        query: What to look for.
        limit (int): At most this many.

    Returns:
        query: not an argument
    """
    return query


def test_a_function_is_described_by_its_signature_and_docstring() -> None:
    [tool] = describe_tools([search])
    described = tool["function"]
    assert tool["type"] == "function"
    assert described["name"] == "search"
    assert described["description"] == "Search the archive. It is large."
    parameters = described["parameters"]
    assert parameters["type"] == "object"
    assert parameters["required"] == ["query"]
    assert parameters["properties"]["query"] == {"type": "string", "description": "What to look for."}
    assert parameters["properties"]["limit"] == {
        "type": "integer",
        "default": 3,
        "description": "At most this many.",
    }
    assert parameters["properties"]["order"]["enum"] == ["new", "old"]
    assert parameters["$defs"]["Place"]["properties"] == {"city": {"type": "string"}}


def test_a_parameter_may_be_called_title() -> None:
    def write(title: str) -> None: ...

    [tool] = describe_tools([write])
    assert tool["function"]["parameters"]["properties"] == {"title": {"type": "string"}}
    assert "description" not in tool["function"]


def test_functions_without_annotations_or_arguments_are_fine() -> None:
    def ping(): ...

    def anything(value, *args, **kwargs): ...

    first, second = describe_tools([ping, anything])
    assert first["function"]["parameters"]["properties"] == {}
    assert second["function"]["parameters"]["properties"] == {"value": {}}


def test_dicts_are_taken_as_they_are() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    assert describe_tools([tool]) == (tool,)


def test_what_json_does_not_have_cannot_be_an_argument() -> None:
    def draw(canvas: object.__class__) -> None: ...

    def lost(value: NoSuchType) -> None: ...  # noqa: F821

    for fn in (draw, lost):
        with pytest.raises(RequestError, match=f"function '{fn.__name__}' cannot be described as a tool"):
            describe_tools([fn])


def test_the_result_of_a_tool_is_text_or_json() -> None:
    call = ToolCall("call_1", "add", {}, "{}")
    assert call.result("3") == {"role": "tool", "tool_call_id": "call_1", "content": "3"}
    assert call.result({"sum": 3, "of": (1, 2)})["content"] == '{"sum": 3, "of": [1, 2]}'
