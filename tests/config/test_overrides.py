"""`-o a.b.c=value`, and `-o a.b.c value`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from etude.config.document import Document, apply_overrides, dig, dump, join_words
from etude.core.errors import RequestError

KEYS = st.text("abcdef_", min_size=1, max_size=4)
PATHS = st.lists(KEYS, min_size=1, max_size=4)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=10)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
TREES = st.dictionaries(KEYS, VALUES, max_size=4)


def overridden(data: dict[str, Any], *overrides: str | tuple[str, str]) -> dict[str, Any]:
    return apply_overrides(Document(data), overrides).data


def leads_into_a_list(tree: dict[str, Any], path: list[str]) -> bool:
    return any(isinstance(dig(tree, tuple(path[:depth])), list) for depth in range(1, len(path)))


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("a.b=5", 5),
        ("a.b=1e-5", 1e-5),
        ("a.b=true", True),
        ("a.b=", None),
        ("a.b=text with spaces", "text with spaces"),
        ("a.b=http://localhost:8000/v1?x=y", "http://localhost:8000/v1?x=y"),
        ("a.b=my_agent:play", "my_agent:play"),
        ("a.b='5'", "5"),
        ("a.b=[1, two]", [1, "two"]),
        ("a.b={c: 1}", {"c": 1}),
        ("a.b=${NAME:-x}", "${NAME:-x}"),
        (("a.b", "5"), 5),
        (("a.b", "x=y"), "x=y"),
    ],
)
def test_the_value_is_yaml(override: str | tuple[str, str], value: Any):
    assert overridden({"a": {"b": 0, "c": 1}}, override) == {"a": {"b": value, "c": 1}}


def test_missing_parents_are_made_and_list_items_are_reached_by_position():
    assert overridden({}, "a.b.c=1") == {"a": {"b": {"c": 1}}}
    assert overridden({"a": [{"b": 1}, {"b": 2}]}, "a.1.b=3") == {"a": [{"b": 1}, {"b": 3}]}


def test_a_component_that_is_written_as_its_type_gets_keys():
    assert overridden({"workflow": "my_agent:play"}, "workflow.timeout=3") == {
        "workflow": {"_type": "my_agent:play", "timeout": 3}
    }


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("finetuning.seed", r"-o finetuning.seed: an override is written key.of.the.config=value"),
        ("=5", r"-o : an override is written"),
        ("a..b=5", r"-o a..b: an override is written"),
        ("a=[1", r"-o a: the value '\[1' is not valid YAML; put it in quotes"),
        ("l.2=5", r"-o l.2: '2' is no position in a list of 2; count from 0"),
        ("l.x.y=5", r"-o l.x.y: 'x' is no position in a list of 2; count from 0"),
    ],
)
def test_what_is_no_override_is_an_error(override: str, message: str):
    with pytest.raises(RequestError, match=message):
        overridden({"l": [1, 2]}, override)


@pytest.mark.parametrize(
    ("words", "joined"),
    [
        (["train", "c.yml", "-o", "a.b", "5"], ["train", "c.yml", "-o", "a.b=5"]),
        (["-o", "a.b=5", "c.yml"], ["-o", "a.b=5", "c.yml"]),
        (["--override", "a.b", "x=y", "-o", "c", "-1"], ["--override", "a.b=x=y", "-o", "c=-1"]),
        (["-o", "a.b"], ["-o", "a.b"]),
        (["-o"], ["-o"]),
        (["--other", "a", "b"], ["--other", "a", "b"]),
    ],
)
def test_the_two_word_form(words: list[str], joined: list[str]):
    assert join_words(words) == joined


@given(TREES, PATHS, VALUES)
def test_an_override_is_what_is_found_there_afterwards(tree: dict[str, Any], path: list[str], value: Any):
    assume(not leads_into_a_list(tree, path))
    text = dump(value).removesuffix("...\n").strip("\n")
    changed = overridden(tree, (".".join(path), text))
    assert dig(changed, tuple(path)) == value
    others = {key: known for key, known in tree.items() if key != path[0]}
    assert {key: known for key, known in changed.items() if key != path[0]} == others


def test_an_override_changes_one_of_two_places_that_share_an_alias():
    shared = {"n": 1}
    assert overridden({"a": shared, "b": shared}, "a.n=2") == {"a": {"n": 2}, "b": {"n": 1}}
