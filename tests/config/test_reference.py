"""The config reference, and the values that a key takes, in words."""

import re

from etude.config.finetuning import FinetuneConfig
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
