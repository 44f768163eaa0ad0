"""Several models to train in one run."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.config.finetuning import CurriculumLearningConfig, FinetuneConfig, TargetConfig
from etude.config.load import load_config, resolved_yaml
from etude.core.errors import ConfigError

TWO = """\
llms: {prover: local, verifier: local, judge: local}
workflow: my_agent:play
eval:
  general: {dataset: train.jsonl}
  evaluators: {proved: my_agent:correct, verified: my_agent:correct}
trajectory_builders: {groups: grpo, more_groups: {_type: grpo, num_generations: 16}}
finetuning:
  enabled: true
  trajectory_builder: groups
  targets:
    prover: {reward_function: {name: proved}, every: 2}
    checker:
      model: verifier
      trajectory_builder: more_groups
      reward_function: {name: verified}
      every: 2
      offset: 1
      curriculum_learning: {enabled: true}
"""


def write(folder: Path, text: str) -> str:
    (folder / "config.yml").write_text(text)
    return "config.yml"


def test_targets_of_one_model_get_an_entry_each_that_agents_name(folder: Path):
    config = load_config(write(folder, TWO.replace("model: verifier", "model: prover")))
    assert list(config.llms) == ["prover", "verifier", "judge", "checker"]
    assert config.llms["checker"] == config.llms["prover"]
    assert [target.model for target in config.finetuning.targets.values()] == ["prover", "checker"]
    assert load_config(write(folder, resolved_yaml(config))).llms == config.llms


def test_what_a_target_leaves_out_is_as_the_whole_block_has_it(folder: Path):
    targets = load_config(write(folder, TWO)).finetuning.targets
    assert list(targets) == ["prover", "checker"]
    prover, checker = targets.values()
    assert (prover.model, checker.model) == ("prover", "verifier")
    assert (prover.trajectory_builder, checker.trajectory_builder) == ("groups", "more_groups")
    assert (prover.trainer_adapter, checker.trainer_adapter) == ("local", "local")
    assert prover.reward_function is not None
    assert prover.reward_function.name == "proved"
    assert prover.target_functions == ["*"]
    assert prover.curriculum_learning == CurriculumLearningConfig()
    assert checker.curriculum_learning == CurriculumLearningConfig(enabled=True)


def test_a_target_by_itself_is_a_block_with_one_model(folder: Path):
    block = load_config(write(folder, TWO)).finetuning.for_target("checker")
    assert block.targets == {}
    assert (block.target_model, block.trajectory_builder) == ("verifier", "more_groups")
    assert block.reward_function is not None
    assert block.reward_function.name == "verified"
    assert block.curriculum_learning.enabled
    assert block.num_epochs == 1


@pytest.mark.parametrize(
    ("written", "instead", "message"),
    [
        (
            "model: verifier",
            "model: verifyer",
            "config.yml:13:7: .* 'llms' has no model 'verifyer'",
        ),
        (
            "checker:",
            "other:\n      model: judge\n    checker:",
            "'eval.evaluators' has several; name one of",
        ),
        (
            "checker:\n      model: verifier",
            "judge:\n      model: prover",
            "'prover' is trained by the target 'prover' already; give the targets names",
        ),
        ("more_groups\n", "many_groups\n", "no trajectory builder 'many_groups'; did you mean 'more_groups'"),
        ("name: verified", "name: verify", "no evaluator 'verify'; did you mean"),
        ("prover: {reward", "stranger: {reward", r"'finetuning.targets.stranger.model' is missing"),
        ("checker:", "a/b:", "a target's name is made of letters"),
        (
            "every: 2\n",
            "evry: 2\n",
            "key 'finetuning.targets.checker.evry' is not known; did you",
        ),
        ("every: 2\n", "every: 0\n", "expected an integer >= 1, found 0"),
        ("  trajectory_builder: groups\n", "", "'trajectory_builders' has several; name one of"),
        ("  enabled: true", "  enabled: true\n  target_model: judge", "models to train are those of"),
    ],
)
def test_a_mistake_in_a_target_is_answered_with_its_place(
    folder: Path, written: str, instead: str, message: str
):
    assert written in TWO
    with pytest.raises(ConfigError, match=message):
        load_config(write(folder, TWO.replace(written, instead)))


def test_something_must_be_trained(folder: Path):
    text = TWO.replace("every: 2}", "frozen: true}").replace("offset: 1", "frozen: true")
    with pytest.raises(ConfigError, match="all of them are frozen"):
        load_config(write(folder, text))


@pytest.mark.parametrize(
    ("schedule", "epochs"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"every": 2}, [0, 2, 4]),
        ({"every": 2, "offset": 1}, [1, 3, 5]),
        ({"every": 1, "offset": 4}, [4, 5]),
        ({"every": 3, "offset": 2}, [2, 5]),
        ({"frozen": True}, []),
    ],
)
def test_the_schedule_of_a_target(schedule: dict[str, int], epochs: list[int]):
    target = TargetConfig(**schedule)
    assert [epoch for epoch in range(6) if target.reason_to_rest(epoch) is None] == epochs


def test_a_rest_says_why():
    assert TargetConfig(frozen=True).reason_to_rest(0) == "frozen"
    assert TargetConfig(every=2).reason_to_rest(1) == "not its turn (every: 2, offset: 0)"


def test_a_function_is_named_once():
    with pytest.raises(ValueError, match="names a function twice"):
        FinetuneConfig(targets={"a": TargetConfig(target_functions=["f", "f"])})


def test_targets_train_the_functions_that_are_named_for_all(folder: Path):
    text = TWO.replace("  enabled: true", "  enabled: true\n  target_functions: [debate]")
    targets = load_config(write(folder, text)).finetuning.targets
    assert [target.target_functions for target in targets.values()] == [["debate"], ["debate"]]
