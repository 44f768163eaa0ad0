from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import json
from typing import Annotated, Any, Literal

import pydantic
import pytest
from pydantic import Field
from typing_extensions import TypedDict

from etude.core.errors import RequestError
from etude.rollout.tools import FunctionTools, describe_tools


class Place(pydantic.BaseModel):
    city: str


def test_what_json_does_not_have_cannot_be_an_argument() -> None:
    def draw(canvas: object.__class__) -> None: ...

    def lose(value: NoSuchType) -> None: ...  # noqa: F821

    for fn in (draw, lose):
        with pytest.raises(RequestError, match=f"function '{fn.__name__}' .* tool: "):
            describe_tools([fn])


def parameters(fn: Any) -> Any:
    [tool] = describe_tools([fn])
    json.dumps(tool, allow_nan=False)
    return tool["function"]["parameters"]


def test_descriptions_and_bounds_of_the_signature_are_told() -> None:
    def book(
        seats: Annotated[int, Field(description="How many.", ge=1, le=9)],
        name: str = Field(description="For whom.", min_length=1),
        row: str = Field("A", description="The row."),
        meals: list[str] = Field(default_factory=list, description="What to eat."),  # noqa: B008
        day: str = "today",
        kind: Literal["table", "bar"] = "table",
        near: Place | None = None,
    ) -> None:
        """Book.

        It is final.

        Args:
            seats: Not this.
            day (str): When.

        Returns:
            name: not an argument
        """

    [tool] = describe_tools([book])
    assert (tool["type"], tool["function"]["name"]) == ("function", "book")
    assert tool["function"]["description"] == "Book. It is final."
    found = parameters(book)
    assert found["type"] == "object" and found["required"] == ["seats", "name"]
    assert found["$defs"]["Place"]["properties"] == {"city": {"type": "string"}}
    assert found["properties"].pop("near")["default"] is None
    assert found["properties"] == {
        "seats": {"type": "integer", "description": "How many.", "minimum": 1, "maximum": 9},
        "name": {"type": "string", "description": "For whom.", "minLength": 1},
        "row": {"type": "string", "description": "The row.", "default": "A"},
        "meals": {"type": "array", "items": {"type": "string"}, "description": "What to eat."},
        "day": {"type": "string", "description": "When.", "default": "today"},
        "kind": {"type": "string", "enum": ["table", "bar"], "default": "table"},
    }


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


class Options(TypedDict, total=False):
    deep: bool


ODD: Any = object()


def paint(
    colour: Colour,
    where: Point,
    near: Place | None = None,
    options: Options | None = None,
    on: datetime.date | None = None,
    *,
    mode: Literal["fast", "fine"] = "fast",
    helper: Any = ODD,
    labels: set[str] = Field(default_factory=set),  # noqa: B008
    schema: str = "",
    model_config: dict[str, str] = {"title": "kept"},  # noqa: B006
    _draft: bool = False,
    from_: str = Field("here", alias="from"),
    **others: int,
) -> dict[str, Any]:
    return locals()


async def test_a_function_gets_what_its_annotations_say() -> None:
    seen = {}

    @functools.wraps(paint)
    def paint_and_note(*args: Any, **kwargs: Any) -> str:
        seen.update(paint(*args, **kwargs))
        return "done"

    given = {
        "colour": "red",
        "where": {"x": "1"},
        "near": {"city": "Rome"},
        "options": {"deep": True},
        "on": "2026-11-27",
        "labels": ["a"],
        "_draft": True,
        "from": "there",
        "more": 3,
    }
    result = await FunctionTools([paint_and_note]).call("paint", given)
    assert (result.text, result.is_error) == ("done", False)
    assert seen == {
        "colour": Colour.RED,
        "where": Point(1),
        "near": Place(city="Rome"),
        "options": {"deep": True},
        "on": datetime.date(2026, 11, 27),
        "mode": "fast",
        "helper": ODD,
        "labels": {"a"},
        "schema": "",
        "model_config": {"title": "kept"},
        "_draft": True,
        "from_": "there",
        "others": {"more": 3},
    }


class Shop:
    """A shop."""

    def __init__(self, stock: int) -> None:
        self.stock = stock

    def sell(self, count: int) -> int:
        """Sell some.

        Args:
            count: How many.
        """
        return self.stock - count

    async def order(self, place: Place) -> str:
        """Order."""
        return place.city

    @classmethod
    def label(cls, name: str) -> str:
        """Its name."""
        return name


@pytest.mark.parametrize(
    ("fn", "name", "text", "said", "given", "answer"),
    [
        (Shop(3).sell, "sell", "Sell some.", {"count": "How many."}, {"count": 1}, "2"),
        (Shop(3).order, "order", "Order.", {"place": None}, {"place": {"city": "Rome"}}, "Rome"),
        (Shop.label, "label", "Its name.", {"name": None}, {"name": "x"}, "x"),
    ],
)
async def test_whatever_can_be_called_is_a_tool(
    fn: Any, name: str, text: str, said: dict[str, str], given: dict[str, Any], answer: str
) -> None:
    [tool] = describe_tools([fn])
    assert (tool["function"]["name"], tool["function"]["description"]) == (name, text)
    properties = parameters(fn)["properties"]
    assert {name: schema.get("description") for name, schema in properties.items()} == said
    result = await FunctionTools([fn]).call(name, given)
    assert (result.text, result.is_error) == (answer, False)


class Shelf:
    def place(self, row: int) -> str:
        """Ask a place for a city that it has not."""
        return Place.model_validate({"row": row}).city


@pytest.mark.parametrize(
    ("row", "said"), [("far", "error: row: Input should be a valid integer"), (1, "for Place\ncity")]
)
async def test_only_arguments_that_do_not_fit_are_the_models_fault(row: Any, said: str) -> None:
    result = await FunctionTools([Shelf().place]).call("place", {"row": row})
    assert result.is_error and said in result.text


def test_a_method_needs_its_object() -> None:
    with pytest.raises(RequestError, match=r"function 'sell' .* bound method; .* JSON"):
        describe_tools([Shop.sell])
