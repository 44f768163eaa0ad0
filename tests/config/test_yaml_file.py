"""YAML with positions, the environment variables in it, and overrides of it: `-o a.b.c=value`."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given

from etude.config import document
from etude.config.document import Document, apply_overrides, dump, parse_document, parse_value, read_document
from etude.core.errors import ConfigError, RequestError
from tests.support import json_values

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

REPEATED = "a: &a 1\n" + "\n".join(f"{b}: &{b} [{f'*{a}, ' * 20}]" for a, b in pairwise("abcdef"))


def test_each_key_has_its_place():
    config = parse_document(TEXT, Path("c.yml"))
    assert config.marks == {
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
    ],
)
def test_words_are_what_they_are_in_yaml_1_2(text: str, value: Any):
    assert parse_value(text) == value and type(parse_value(text)) is type(value)
    assert parse_document(f"a: {text}", Path("c.yml")).data == {"a": value}


@pytest.mark.parametrize(
    "text", ["yes", "010", "0o10", "08", "1:30", "1_000", "2024-01-01", "1e5", ".inf", "~"]
)
def test_text_is_written_so_that_readers_of_either_yaml_take_it_for_text(text: str):
    assert parse_value(dump([text])) == yaml.safe_load(dump([text])) == [text]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 1" + "0" * 5000, "c.yml: not valid YAML: Exceeds the limit"),
        ("a: 1\nb: " + "[" * 500 + "]" * 500, "c.yml: not valid YAML: it is too deep"),
        (REPEATED, "c.yml: it has over 100000 keys"),
        ("a: 1\nb: {{ question }}", "c.yml:2:5: .*put text with ':' or '{' in quotes"),
        ("a: 1\nb: a\x07", "c.yml:2: .*special characters"),
        ("a: 1\nb: !!int yes", "c.yml: not valid YAML: invalid literal"),
        ("a: 1\na: 2\n", "c.yml:2:1: key 'a' .*twice, .*line 1"),
        ("a:\n  - b: 1\n    b: 2\n", "c.yml:3:5: key 'a.0.b' .*twice, .*line 2"),
        ("{a: 1, 'a': 2}\n", "c.yml:1:8: key 'a' .*twice, .*line 1"),
        ("a: !!python/object/apply:os.system [ls]", "constructor .*os.system"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        parse_document(text, Path("c.yml"))


def test_a_byte_order_mark_is_no_part_of_a_config(tmp_path: Path):
    (tmp_path / "c.yml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_document(tmp_path / "c.yml").data == {"a": 1}


def test_the_place_of_a_missing_key_is_that_of_its_parent():
    config = parse_document(TEXT, Path("c.yml"))
    assert config.place(("llms", "b", "model_name")) == ("c.yml", 5, 3)
    assert config.place(("workflow",)) == ("c.yml", 1, 1)


@given(json_values())
def test_what_is_dumped_reads_back(tree: Any):
    assert parse_value(dump(tree)) == tree


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${HOST}", "example.org"),
        ("http://${HOST}:${PORT}/v1", "http://example.org:8000/v1"),
        ("${HOST:-localhost}", "example.org"),
        ("${NOT_SET:-localhost}", "localhost"),
        ("${NOT_SET:-}", ""),
        ("${EMPTY}", ""),
        ("${EMPTY:-localhost}", "localhost"),
        ("$${HOST}", "${HOST}"),
        ("$$$${HOST}", "$${HOST}"),
        ("$${HOST} $$ ${HOST}", "${HOST} $ example.org"),
        ("costs 5 $", "costs 5 $"),
        ("$HOST", "$HOST"),
        ("${NESTED}", "${HOST} $$"),
    ],
)
def test_references(text: str, value: str):
    environ = {"HOST": "example.org", "PORT": "8000", "EMPTY": "", "NESTED": "${HOST} $$"}
    assert document.interpolate(text, environ) == value


@pytest.mark.parametrize("text", ["${", "${}", "${1X}", "${HOST", "${HOST-x}", "${HO ST}", "a ${:-b}"])
def test_what_only_begins_like_a_reference_is_an_error(text: str):
    with pytest.raises(ValueError, match="must begin"):
        document.interpolate(text, {"HOST": "example.org"})


def apply(data: dict[str, Any], *overrides: str) -> dict[str, Any]:
    return apply_overrides(Document(data), overrides).data


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("a.b=5", 5),
        ("a.b=", None),
        ("a.b=text with spaces", "text with spaces"),
        ("a.b=http://localhost:8000/v1?x=y", "http://localhost:8000/v1?x=y"),
        ("a.b=my_agent:play", "my_agent:play"),
        ("a.b={c: [1, two]}", {"c": [1, "two"]}),
        ("a.b=${NAME:-x}", "${NAME:-x}"),
    ],
)
def test_the_value_is_yaml(override: str, value: Any):
    assert apply({"a": {"b": 0, "c": 1}}, override) == {"a": {"b": value, "c": 1}}


def test_missing_parents_are_made_and_list_items_are_reached_by_position():
    assert apply({}, "a.b.c=1") == {"a": {"b": {"c": 1}}}
    assert apply({"a": [{"b": 1}, {"b": 2}]}, "a.1.b=3") == {"a": [{"b": 1}, {"b": 3}]}
    assert apply({"llms": {"gpt-4.1": {"a": 1}}}, "llms.gpt-4.1.a=2") == {"llms": {"gpt-4.1": {"a": 2}}}


def test_a_component_that_is_written_as_its_type_gets_keys():
    assert apply({"workflow": "my_agent:play"}, "workflow.timeout=3") == {
        "workflow": {"_type": "my_agent:play", "timeout": 3}
    }
    stored = apply({"storage": "file:///x"}, "storage.interval=5")
    assert stored == {"storage": {"address": "file:///x", "interval": 5}}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("finetuning.seed", r"-o finetuning.seed: .*key.of.the.config=value"),
        ("=5", r"-o : .*key.of.the.config=value"),
        ("a..b=5", r"-o a..b: .*key.of.the.config=value"),
        ("a=[1", r"-o a: .*'\[1' is not valid YAML; .*quotes"),
        ("l.2=5", r"-o l.2: '2' .*list of 2; .*from 0"),
        ("l.x.y=5", r"-o l.x.y: 'x' .*list of 2; .*from 0"),
    ],
)
def test_what_is_no_override_is_an_error(override: str, message: str):
    with pytest.raises(RequestError, match=message):
        apply({"l": [1, 2]}, override)


def test_an_override_changes_one_of_two_places_that_share_an_alias():
    shared = {"n": 1}
    assert apply({"a": shared, "b": shared}, "a.n=2") == {"a": {"n": 2}, "b": {"n": 1}}
