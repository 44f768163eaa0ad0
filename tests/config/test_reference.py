"""The config reference."""

from __future__ import annotations

import re

from pydantic import Field, create_model

from etude.config.finetuning import FinetuneConfig, TrainerConfig
from etude.config.registry import load_entry_points, register_trainer
from etude.config.slots import descriptions
from tests.config.reference import render_reference


def test_every_key_of_every_block_is_there(parts: object):
    text = render_reference("tests")
    keys = re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)
    assert set(FinetuneConfig.model_fields) <= set(keys)
    assert {"llms", "max_concurrency", "evaluators", "initial_percentile", "validation_interval"} <= set(keys)
    assert "| `num_epochs` | an integer >= 1 | `1` | How many times to collect and train. |" in text
    assert "### `finetuning` › `curriculum_learning`" in text


def test_a_block_that_stands_under_names_of_ones_own_has_a_table_too(parts: object):
    text = render_reference("tests")
    assert "| `targets` | the block below, by a name of your own |  | Several models" in text
    assert "### `finetuning` › `targets`" in text
    assert "| `every` | an integer >= 1 | `1` | Train in every n-th epoch only, to alternate. |" in text


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
