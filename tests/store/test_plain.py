from __future__ import annotations

import enum
import json
from dataclasses import dataclass

import numpy
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.store.plain import plain


@dataclass
class Point:
    x: int
    tags: tuple[str, ...] = ()


class Model(pydantic.BaseModel):
    point: int


class Colour(enum.StrEnum):
    RED = "red"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(json_values)
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
        (numpy.int32(7), 7),
        (numpy.bool_(True), True),
        (numpy.array(0.5), 0.5),
    ],
)
def test_what_json_can_say_is_said(value: object, expected: object) -> None:
    assert plain(value) == expected
    assert type(plain(value)) is type(expected)


def test_keys_become_text_as_json_makes_them() -> None:
    value = {3: "int", 2.5: "float", True: "bool", None: "null", Colour.RED: "enum"}
    assert plain(value) == json.loads(json.dumps(value))


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1},
        b"bytes",
        numpy.zeros(2),
        numpy.zeros(1),
        numpy.longdouble(1),
        {(1, 2): 3},
        Point,
        {1: 0, "1": 0},
    ],
)
def test_the_rest_is_refused_by_type(value: object) -> None:
    with pytest.raises(TypeError, match="is not JSON"):
        plain({"inside": [value]})
