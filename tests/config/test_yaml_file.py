"""YAML with positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from etude.config.document import dump, parse_document, parse_value, read_document
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


def test_the_data_is_what_safe_load_reads_apart_from_words_of_yaml_1_1():
    expected = yaml.safe_load(TEXT.replace("1e-5", "1.0e-5").replace("yes", "'yes'"))
    assert parse_document(TEXT, Path("c.yml")).data == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((word, word) for word in ("yes", "No", "on", "OFF", "y", "n", "=")),
        *(
            (word, word)
            for word in ("1:30", "1:30:00.5", "-1_0.5", "0b11", "2024-01-01", "2024-01-01T00:00:00Z")
        ),
        *((word, word) for word in ("1e5x", "e5", "1_000")),
        ("1e-5", 1e-5),
        ("-2e+3", -2000.0),
        (".5e1", 5.0),
        ("'1e-5'", "1e-5"),
        ("010", 10),
        ("08", 8),
        ("0o10", 8),
        ("0x1F", 31),
        ("010.5", 10.5),
        ("1.", 1.0),
        ("TRUE", True),
        ("Null", None),
        ("~", None),
        ("{no: NO}", {"no": "NO"}),
        ('"\\ud83d\\ude00"', "\U0001f600"),
    ],
)
def test_words_are_what_they_are_in_yaml_1_2(text: str, value: Any):
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)
    assert parse_document(f"a: {text}", Path("c.yml")).data == {"a": value}


@pytest.mark.parametrize(
    "text", ["yes", "010", "0o10", "08", "1:30", "1_000", "2024-01-01", "1e5", ".inf", "~"]
)
def test_text_is_written_so_that_readers_of_either_yaml_take_it_for_text(text: str):
    assert parse_value(dump([text])) == yaml.safe_load(dump([text])) == [text]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "1" + "0" * 5000,
            "c.yml:2:4: not valid YAML: a whole number has more than 4300 digits; put it in quotes",
        ),
        ("[" * 5000, "c.yml:2: not valid YAML: it is nested too deeply"),
        (
            '"\\ud83d"',
            "c.yml:2:4: not valid YAML: half of a surrogate pair is no character; write the whole character",
        ),
        (
            '"\\UFFFFFFFF"',
            "c.yml:2: not valid YAML: an escape in double quotes is beyond the last character, \\U0010FFFF",
        ),
        (
            "{{ question }}",
            "c.yml:2:5: not valid YAML: found unhashable key; "
            "a key is a text or a number; put a value that holds '{{' in quotes",
        ),
        ("a\x07", "c.yml:2: not valid YAML: it holds the sign '\\x07', which is not to be printed"),
        ("!!int yes", "c.yml:2:4: not valid YAML: 'yes' is no whole number"),
        ("!!float x", "c.yml:2:4: not valid YAML: 'x' is no number"),
    ],
)
def test_a_value_that_cannot_be_read_is_refused_with_its_line(value: str, message: str):
    with pytest.raises(ConfigError) as raised:
        parse_document(f"a: 1\nb: {value}\n", Path("c.yml"))
    assert str(raised.value) == message


def test_a_byte_order_mark_is_no_part_of_a_config(tmp_path: Path):
    (tmp_path / "c.yml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_document(tmp_path / "c.yml").data == {"a": 1}


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
    with pytest.raises(ConfigError, match="could not determine a constructor for the tag"):
        parse_document("a: !!python/object/apply:os.system [ls]", Path("c.yml"))


@given(TREES)
def test_what_is_dumped_reads_back(tree: Any):
    assert parse_value(dump(tree)) == tree
