"""The public names: all are there, those of the reference pages among them."""

from __future__ import annotations

import ast
import importlib
import os
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

import etude
from etude.config.registry import names as registered
from etude.core.evaluation import EvaluationRunOutput
from tests.cli.projects import scripted_project

EXCERPT = Path(__file__).parent / "reference_names.txt"
ASKED_FOR = {"RewardFunctionConfig", "CurriculumLearningConfig", "EvalInput"}
"""Fields of the pages' values, whose types they do not name."""

_IMPORT = re.compile(r"^\s*from (?:nat|nip|art)[\w.]* import (?:\(([^)]*)\)|(.*))$", re.MULTILINE)
_CLASS = re.compile(r"^\s*(?:- )?class ([\w.]+)\s*[(:]", re.MULTILINE)
_PATH = re.compile(r"\b(?:nat|nip)(?:\.[a-z_]+)+\.([A-Z]\w+)")
_ERROR = re.compile(r"^(\w+Error) –", re.MULTILINE)


def names_in(page: str) -> set[str]:
    """The names that a page imports from the toolkit, defines, refers to by their path or says are raised.

    Those of a reader's own parts, which are called `My…`, and of Python are not among them.
    """
    imported = [name.strip() for match in _IMPORT.findall(page) for name in "".join(match).split(",")]
    defined = [path.rpartition(".")[2] for path in _CLASS.findall(page)]
    found = {*imported, *defined, *_PATH.findall(page), *_ERROR.findall(page)} - {"", "TimeoutError"}
    return {name for name in found if not name.startswith("My")}


def test_what_type_checkers_see_is_what_there_is():
    tree = ast.parse(Path(etude.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {}
    for node in guarded.body:
        if isinstance(node, ast.ImportFrom) and node.module != "typing":
            (alias,) = node.names
            assert alias.asname == alias.name, "a name that is imported by itself is not public to checkers"
            seen[alias.name] = getattr(importlib.import_module(node.module), alias.name)
    assert {*seen, "__version__"} == set(etude.__all__) == set(etude.__all__) & {*dir(etude)}
    assert all(getattr(etude, name) is value for name, value in seen.items())


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'etude' has no attribute 'nothing'"):
        etude.nothing  # noqa: B018


def test_the_shipped_algorithms_are_registered():
    assert {"grpo", "dpo", "expert_iteration", "malt", "supervised"} <= {*registered("trajectory_builders")}


def test_every_name_of_the_pages_is_there():
    names = names_in(EXCERPT.read_text(encoding="utf-8")) | ASKED_FOR
    assert {"FinetuneRunConfig", "ARTTrainerAdapter", "PureTextSharedModelGroup", "EvaluationRun"} <= names
    assert len(names) == 28
    assert names <= set(etude.__all__), names - set(etude.__all__)


def test_the_excerpt_has_all_names_of_the_whole_pages():
    folder = os.environ.get("ETUDE_REFERENCE_PAGES")
    if folder is None:
        pytest.skip("ETUDE_REFERENCE_PAGES does not name the folder of the pages")
    pages = [path.read_text(encoding="utf-8") for path in sorted(Path(folder).glob("*.txt"))]
    assert pages
    assert names_in(EXCERPT.read_text(encoding="utf-8")) == set().union(*map(names_in, pages))


@pytest.mark.parametrize("interface", [etude.Trainer, etude.TrainerAdapter, etude.TrajectoryBuilder])
def test_the_interfaces_cannot_be_made_as_they_are(interface):
    with pytest.raises(TypeError, match="abstract"):
        interface(None)


def test_the_finetuning_block_starts_with_the_toolkits_defaults():
    block = etude.FinetuneConfig()
    assert (block.enabled, block.num_epochs, block.target_functions) == (False, 1, ["<workflow>"])
    learning = block.curriculum_learning
    assert (learning.initial_percentile, learning.increment_percentile) == (0.3, 0.2)
    assert (learning.expansion_interval, learning.min_reward_diff, learning.sort_ascending) == (5, 0.1, False)
    with pytest.raises(ValidationError):
        etude.FinetuneConfig(num_epochs=0)


async def test_an_evaluation_by_the_toolkits_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scripted_project(tmp_path)
    held_out = etude.EvaluationRunConfig(config_file="config.yml")
    mine = etude.EvaluationRunConfig(
        config_file="config.yml", dataset="train.jsonl", reps=2, override=(("finetuning.seed", "3"),)
    )
    for config, examples, episodes in ((held_out, 6, 6), (mine, 8, 16)):
        output = await etude.EvaluationRun(config).run_and_evaluate()
        assert isinstance(output, EvaluationRunOutput)
        items = output.eval_input.eval_input_items
        assert (len({item.id for item in items}), len(items)) == (examples, episodes)
        assert len(output.scores()["correct"]) == episodes
