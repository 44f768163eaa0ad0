"""YAML with positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from etude.config.document import dump, parse_document, parse_value
from etude.core.errors import ConfigError

TEXT = """\
llms:
  a: &base
    temperature: 1e-5
    tags: [x, {y: 1}]
  b:
    <<: *base
    temperature: 2
    "quoted": yes
"""

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


def test_each_key_has_its_place():
    document = parse_document(TEXT, Path("c.yml"))
    assert document.marks == {
        (): (1, 1),
        ("llms",): (1, 1),
        ("llms", "a"): (2, 3),
        ("llms", "a", "temperature"): (3, 5),
        ("llms", "a", "tags"): (4, 5),
        ("llms", "a", "tags", 0): (4, 12),
        ("llms", "a", "tags", 1): (4, 15),
        ("llms", "a", "tags", 1, "y"): (4, 16),
        ("llms", "b"): (5, 3),
        ("llms", "b", "temperature"): (7, 5),
        ("llms", "b", "tags"): (4, 5),
        ("llms", "b", "tags", 0): (4, 12),
        ("llms", "b", "tags", 1): (4, 15),
        ("llms", "b", "tags", 1, "y"): (4, 16),
        ("llms", "b", "quoted"): (8, 5),
    }


def test_the_data_is_what_safe_load_reads_apart_from_numbers_with_an_exponent():
    expected = yaml.safe_load(TEXT.replace("1e-5", "1.0e-5"))
    assert parse_document(TEXT, Path("c.yml")).data == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        ("-2e+3", -2000.0),
        ("1.5e3", 1500.0),
        (".5e1", 5.0),
        ("1e5x", "1e5x"),
        ("e5", "e5"),
        ("'1e-5'", "1e-5"),
        ("0x1e5", 0x1E5),
        ("1_000", 1000),
    ],
)
def test_numbers(text: str, value: Any):
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


def test_the_place_of_a_missing_key_is_that_of_its_parent():
    document = parse_document(TEXT, Path("c.yml"))
    assert document.place(("llms", "b", "model_name")) == ("c.yml", 5, 3)
    assert document.place(("workflow",)) == ("c.yml", 1, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", "c.yml:2:1: key 'a' is given twice, first in line 1; keep one"),
        ("a:\n  - b: 1\n    b: 2\n", "c.yml:3:5: key 'a.0.b' is given twice, first in line 2; keep one"),
        ("{a: 1, 'a': 2}\n", "c.yml:1:8: key 'a' is given twice, first in line 1; keep one"),
    ],
)
def test_a_key_given_twice_is_an_error(text: str, message: str):
    with pytest.raises(ConfigError) as raised:
        parse_document(text, Path("c.yml"))
    assert str(raised.value) == message


def test_python_objects_are_refused():
    with pytest.raises(ConfigError, match="could not determine a constructor"):
        parse_document("a: !!python/object/apply:os.system [ls]", Path("c.yml"))


@given(TREES)
def test_what_is_dumped_reads_back(tree: Any):
    assert parse_value(dump(tree)) == tree
