"""The config reference, and the values that a key takes, in words."""

from __future__ import annotations

import re
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, create_model

from etude.config.finetuning import FinetuneConfig
from etude.config.key_types import KeyType, descriptions, slot_at, unknown_keys
from etude.config.registry import load_entry_points
from tests.config.reference import describe, render_reference


def test_every_key_of_every_block_is_there(parts: object):
    text = render_reference("tests")
    keys = re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)
    assert set(FinetuneConfig.model_fields) <= set(keys)
    assert {"llms", "max_concurrency", "evaluators", "initial_percentile", "every"} <= set(keys)
    assert "| `num_epochs` | an integer >= 1 | `1` |" in text
    assert "| `targets` | the block below, by a name of your own |  | Several models" in text


def test_keys_and_blocks_that_several_have_are_there_once():
    load_entry_points()
    rows = [line for line in render_reference().splitlines() if line.startswith("| `")]
    for key in ("`call_timeout` | a number > 0 | `30.0`", "`initial_percentile`"):
        assert sum(row.startswith(f"| {key}") for row in rows) == 1, key


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
    # A class without source has those of its fields alone.
    made = create_model("Made", size=(int, Field(default=1, description="How many.")), bare=(int, 2))
    assert descriptions(made) == {"size": "How many."}


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
