"""The config reference, and the values that a key takes, in words."""

from __future__ import annotations

import re

from pydantic import Field, create_model

from etude.config.finetuning import FinetuneConfig
from etude.config.key_types import descriptions
from etude.config.registry import load_entry_points
from tests.config.reference import render_reference


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
