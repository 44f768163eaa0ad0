"""The values that a key takes, in words."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from etude.config.slots import Slot, describe, shown, slot_at, unknown_keys


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Inner(BaseModel):
    size: int = Field(default=1, ge=1, lt=9)


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class Outer(BaseModel):
    inner: Inner | None = None
    many: dict[str, Inner] = {}
    listed: list[Annotated[float, Field(gt=0)]] = []
    either: str | Inner = ""
    free: dict[str, Any] = {}
    renamed: int = Field(default=0, alias="class")
    open: Open = Open()


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "an integer"),
        (float | None, "a number"),
        (bool, "true or false"),
        (str, "text"),
        (SecretStr | None, "text"),
        (Path, "a path"),
        (str | Path | None, "text or a path"),
        (Any, "any value"),
        (list[str], "a list of texts"),
        (list[int], "a list of integers"),
        (tuple[float, ...], "a list of numbers"),
        (list, "a list"),
        (dict[str, int], "a mapping"),
        (Inner, "a mapping with the keys size"),
        (Literal["a", "b"], "one of 'a', 'b'"),
        (Literal["a"], "'a'"),
        (Colour, "one of 'red', 'blue'"),
        (Annotated[str, "note"], "text"),
        (complex, "complex"),
    ],
)
def test_types(annotation: Any, words: str):
    assert describe(Slot(annotation)) == words


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (("inner", "size"), "an integer >= 1 and < 9"),
        (("many", "x", "size"), "an integer >= 1 and < 9"),
        (("listed", 3), "a number > 0"),
        (("either", "size"), "an integer >= 1 and < 9"),
        (("free", "x"), "any value"),
        (("class",), "an integer"),
    ],
)
def test_the_slot_of_a_path(path: tuple[str | int, ...], words: str):
    slot = slot_at(Outer, path)
    assert slot is not None
    assert describe(slot) == words


def test_keys_that_pydantic_would_drop_are_found():
    data = {
        "nope": 1,
        "inner": {"sise": 1},
        "many": {"x": {"size": 1, "sise": 2}},
        "either": {"size": 1},
        "free": {"x": {"y": 1}},
        "open": {"x": 1},
        "listed": [1],
        "class": 1,
    }
    assert list(unknown_keys(Slot(Outer), data)) == [("nope",), ("inner", "sise"), ("many", "x", "sise")]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "nothing"),
        ({"a": 1}, "a mapping"),
        ([1], "a list"),
        (True, "true"),
        (1.5, "1.5"),
        ("x", "'x'"),
        ("x" * 100, "'" + "x" * 58 + "…"),
    ],
)
def test_what_was_found(value: Any, words: str):
    assert shown(value) == words
