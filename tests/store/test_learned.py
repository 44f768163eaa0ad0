"""The samples that a learner was given, kept beside the versions, and values as plain data."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass

import numpy
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.core.errors import StoreError
from etude.core.json_text import plain
from etude.core.sample import Pair, Sample, Turn
from etude.store.learned import ids_digest, learned_lines, read_learned, write_learned
from tests.support import drawn


@st.composite
def samples(draw):
    """Samples of one or two answers, with and without weights and advantages of their own."""
    lengths = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=2))
    mask, turns = [], []
    for context, answer in lengths:
        start = len(mask) + context
        mask += [False] * context + [True] * answer
        turns.append(Turn(start, len(mask), model_version=draw(st.integers(0, 9))))
    numbers = st.floats(-5, 5, allow_nan=False)
    ids = tuple(draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(mask), max_size=len(mask))))
    sample = Sample(ids, tuple(mask), (0.0,) * len(mask), turns=tuple(turns), episode='train/1/é"/0')
    each = st.lists(numbers, min_size=len(mask), max_size=len(mask)).map(tuple)
    of_turns = st.lists(numbers, min_size=len(turns), max_size=len(turns)).map(sample.by_token)
    advantages = draw(st.none() | each | of_turns)
    weights = draw(st.none() | each | of_turns)
    return Sample(
        ids, tuple(mask), (0.0,) * len(mask), advantages, weights, turns=tuple(turns), episode=sample.episode
    )


@settings(max_examples=drawn(10))
@given(sample=samples())
def test_what_was_given_is_read_back(tmp_path_factory, sample):
    run = tmp_path_factory.mktemp("run")
    write_learned(run / "checkpoints", 3, learned_lines(3, [(sample,)]))
    (back,) = read_learned(run, sample.episode)
    assert (back.version, back.length, back.digest) == (3, len(sample.ids), ids_digest(sample.ids))
    assert back.weights == tuple(map(float, sample.loss_weights))
    assert back.advantages == sample.advantages


def test_both_sides_of_a_pair_are_told_apart(tmp_path):
    one = Sample((1, 2), (False, True), (0.0, -1.0), turns=(Turn(1, 2),), episode="e/0")
    other = Sample((1, 3), (False, True), (0.0, -1.0), turns=(Turn(1, 2),), episode="e/1")
    lines = learned_lines(1, [Pair(one, other, 1).samples])
    write_learned(tmp_path / "checkpoints" / "policy", 1, lines)
    assert [each.side for id in ("e/0", "e/1") for each in read_learned(tmp_path, id)] == [
        "chosen",
        "rejected",
    ]
    assert read_learned(tmp_path, "e/2") == []


def test_a_damaged_file_is_named(tmp_path):
    folder = tmp_path / "checkpoints" / "learned"
    folder.mkdir(parents=True)
    (folder / "v1.jsonl").write_text('{"episode":"e/0",\n')
    with pytest.raises(StoreError, match=r"v1\.jsonl"):
        read_learned(tmp_path, "e/0")


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


@settings(max_examples=drawn(10))
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
    "value", [object(), {1}, b"bytes", numpy.zeros(2), {(1, 2): 3}, Point, {1: 0, "1": 0}]
)
def test_the_rest_is_refused_by_type(value: object) -> None:
    with pytest.raises(TypeError, match="is not JSON"):
        plain({"inside": [value]})
