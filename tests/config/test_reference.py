"""The config reference, and the values that a key takes, in words."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, SecretStr, create_model

from etude.config.finetuning import FinetuneConfig, TrainerConfig
from etude.config.key_types import KeyType, describe, descriptions, shown, slot_at, unknown_keys
from etude.config.registry import load_entry_points, register_trainer
from tests.config.reference import render_reference


def test_every_key_of_every_block_is_there(parts: object):
    text = render_reference("tests")
    keys = re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)
    assert set(FinetuneConfig.model_fields) <= set(keys)
    assert {"llms", "max_concurrency", "evaluators", "initial_percentile", "validation_interval"} <= set(keys)
    assert "| `num_epochs` | an integer >= 1 | `1` |" in text
    assert "### `finetuning` › `curriculum_learning`" in text


def test_a_block_that_stands_under_names_of_ones_own_has_a_table_too(parts: object):
    text = render_reference("tests")
    assert "| `targets` | the block below, by a name of your own |  | Several models" in text
    assert "### `finetuning` › `targets`" in text
    assert "| `every` | an integer >= 1 | `1` |" in text


def test_keys_and_blocks_that_several_have_are_there_once():
    load_entry_points()
    text = render_reference()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    for key in ("`call_timeout` | a number > 0 | `30.0`", "`initial_percentile`"):
        assert sum(row.startswith(f"| {key}") for row in rows) == 1, key
    assert "| `curriculum_learning` | a block: `finetuning` › `curriculum_learning` |" in text
    assert "Further keys: *Keys of every model*." in text
    assert "_type: live" not in text


def test_components_of_other_packages_are_not(parts: object):
    class AcmeConfig(TrainerConfig, name="acme"):
        """Not ours."""

        either: str = Field(default="a|b", description="This | that.")

    AcmeConfig.__module__ = "acme.trainer"

    async def build(config, builder):
        yield config

    register_trainer(config_type=AcmeConfig)(build)
    assert "acme" not in render_reference("tests")
    assert "| `either` | text | `a\\|b` | This \\| that. |" in render_reference("acme")


def test_docstrings_below_keys_are_their_descriptions_as_pydantic_reads_them(parts: object):
    class Read(FinetuneConfig, use_attribute_docstrings=True):
        described: int = Field(default=1, description="In its field.")
        """Not this."""
        below: int = 2
        """Over two
        lines."""
        bare: int = 3

    own = {name: Read.model_fields[name].description for name in ("described", "below", "bare")}
    assert {name: descriptions(Read).get(name) for name in own} == own
    assert descriptions(Read)["num_epochs"] == descriptions(FinetuneConfig)["num_epochs"]


def test_a_class_without_source_has_the_descriptions_of_its_fields_alone():
    made = create_model("Made", size=(int, Field(default=1, description="How many.")), bare=(int, 2))
    assert descriptions(made) == {"size": "How many."}


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
    assert describe(KeyType(annotation)) == words


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
    assert list(unknown_keys(KeyType(Outer), data)) == [("nope",), ("inner", "sise"), ("many", "x", "sise")]


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
