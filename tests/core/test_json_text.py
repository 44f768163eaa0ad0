from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.core.json_text import DEEPEST, read_json

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


@given(values)
def test_what_is_within_the_limits_is_read_as_it_is(value) -> None:
    assert read_json(json.dumps(value)) == value
    assert read_json(json.dumps(value, ensure_ascii=False).encode()) == value


def test_brackets_in_a_text_are_no_levels() -> None:
    text = '[{"\\' * 10_000
    assert read_json(json.dumps({"a": text, "b": ["]"]})) == {"a": text, "b": ["]"]}


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 65 + "]" * 65, '{"a":' * 65 + "1" + "}" * 65])
def test_what_is_nested_too_deeply_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="nested deeper than 64 levels"):
        read_json(text)


def test_the_deepest_that_may_be() -> None:
    value = read_json("[" * DEEPEST + "]" * DEEPEST)
    assert json.dumps(value).count("[") == DEEPEST


def test_too_many_values_are_refused() -> None:
    assert len(read_json("[0,0,0]", most_values=5)) == 3
    for text in ("[0,0,0,0,0,0]", '{"a": [1, 2], "b": [3, 4]}', "[[],[],[],[]]"):
        with pytest.raises(ValueError, match="more than 5 values"):
            read_json(text, most_values=5)


@pytest.mark.parametrize(
    "text", ['"\\ud800"', '{"\\udc00": 1}', "NaN", "[Infinity]", '"\\', '"', "", b"\xff", "\ud800"]
)
def test_what_is_no_json_is_a_value_error(text) -> None:
    with pytest.raises(ValueError):
        read_json(text)
