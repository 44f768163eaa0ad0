import enum
import json
from dataclasses import dataclass
from typing import Any

import numpy
import pydantic
import pytest
import torch
from hypothesis import given

from etude.core.json_text import DEEPEST, JsonError, jsonable, plain, read_json
from etude.core.keys import content_hash
from tests.support import json_values


@given(json_values(infinite=False))
def test_what_is_within_the_limits_is_read_as_it_is(value) -> None:
    assert read_json(json.dumps(value)) == value
    assert read_json(json.dumps(value, ensure_ascii=False).encode()) == value


def test_brackets_in_a_text_are_no_levels() -> None:
    text = '[{"\\' * 10_000
    assert read_json(json.dumps({"a": text, "b": ["]"]})) == {"a": text, "b": ["]"]}


def test_the_deepest_that_may_be() -> None:
    assert json.dumps(read_json("[" * DEEPEST + "]" * DEEPEST)).count("[") == DEEPEST


def test_too_many_values_are_refused() -> None:
    assert len(read_json("[0,0,0]", most_values=5)) == 3
    for text in ("[0,0,0,0,0,0]", '{"a": [1, 2], "b": [3, 4]}', "[[],[],[],[]]"):
        with pytest.raises(JsonError, match="more than 5 values"):
            read_json(text, most_values=5)


TOO_DEEP = ["[" * 100_000, "[" * 65 + "]" * 65, '{"a":' * 65 + "1" + "}" * 65]


@pytest.mark.parametrize(
    "text", ['"\\ud800"', '{"\\udc00": 1}', "NaN", "[Infinity]", '"\\', '"', "", b"\xff", "\ud800", *TOO_DEEP]
)
def test_what_is_no_json_is_a_value_error(text) -> None:
    with pytest.raises(JsonError):
        read_json(text)


@pytest.mark.parametrize(
    ("text", "problem", "line", "column"),
    [
        ('{"a": 1,\n "a": 2}', 'key "a" is given twice', 2, 6),
        ("[1,\n1" + "0" * 5000 + "]", "more than 4300 digits", 2, 4302),
        ('[1,\n"\\ud83d"]', "surrogate pair", 2, 8),
        (b'[1,\n"\xe4"]', "byte 0xe4 is not UTF-8", 2, 2),
        ("[1,\n-Infinity]", "no NaN and no Infinity", 2, 2),
        ("[1,\n" + "[" * 300, "deeper than 64 levels", 2, 201),
        ("[1e400]", "for a float", None, None),
    ],
)
def test_an_error_says_where_and_what_to_do(text, problem: str, line: int | None, column: int | None) -> None:
    with pytest.raises(JsonError) as caught:
        read_json(text)
    assert problem in caught.value.problem
    assert (caught.value.line, caught.value.column) == (line, column)


def test_what_a_model_says_may_have_a_key_twice() -> None:
    assert read_json('{"a": 1, "a": 2}', unique_keys=False) == {"a": 2}


@dataclass
class Point:
    x: int
    tags: tuple[str, ...] = ()


class Model(pydantic.BaseModel):
    point: int


class Colour(enum.StrEnum):
    RED = "red"


@given(json_values(infinite=False))
def test_json_values_stay_what_they_are(value: object) -> None:
    assert plain(value) == value


def test_a_copy_shares_nothing() -> None:
    inner = {"a": [1]}
    copy = plain({"inner": inner})
    inner["a"].append(2)
    assert copy == {"inner": {"a": [1]}}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ((1, (2,)), [1, [2]]),
        (Point(1, ("a",)), {"x": 1, "tags": ["a"]}),
        (Model(point=3), {"point": 3}),
        (Colour.RED, "red"),
        (numpy.float64(0.5), 0.5),
        (numpy.bool_(True), True),
        (numpy.array(0.5), 0.5),
    ],
)
def test_what_json_can_say_is_said(value: object, expected: object) -> None:
    assert plain(value) == expected
    assert type(plain(value)) is type(expected)


@pytest.mark.parametrize("kind", [numpy.array, lambda values: numpy.array(values, object), torch.tensor])
def test_arrays_with_the_same_shortened_text_are_told_apart(kind: Any) -> None:
    first, same, other = (kind([0.0] * 2000 + [end] + [0.0] * 2000) for end in (1e-9, 1e-9, 2e-9))
    assert jsonable(first) == jsonable(same) != jsonable(other)
    assert content_hash([first]) == content_hash([same]) != content_hash([other])


def test_keys_become_text_as_json_makes_them() -> None:
    value = {3: "int", 2.5: "float", True: "bool", None: "null", Colour.RED: "enum"}
    assert plain(value) == json.loads(json.dumps(value))


@pytest.mark.parametrize(
    "value", [object(), {1}, b"bytes", numpy.zeros(2), {(1, 2): 3}, Point, {1: 0, "1": 0}]
)
def test_the_rest_is_refused_by_type(value: object) -> None:
    with pytest.raises(TypeError, match="is not JSON"):
        plain({"inside": [value]})
