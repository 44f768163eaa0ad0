"""Several models to train in one run, and the blocks `warm_up` and `alarms`."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from etude.backends.trainer_adapter import JobHyperparameters
from etude.config.finetuning import (
    CurriculumLearningConfig,
    FinetuneConfig,
    TargetConfig,
    WarmUpConfig,
    read_transcripts,
)
from etude.config.load import load_config, parse_config, resolved_yaml
from etude.core.episode import Example
from etude.core.errors import ConfigError, DatasetError
from etude.loop.alarms import Alarm, active_alarms

TWO = """\
llms: {prover: local, verifier: local, judge: local}
workflow: my_agent:play
eval:
  general: {dataset: train.jsonl}
  evaluators: {proved: my_agent:correct, verified: my_agent:correct}
trajectory_builders: {groups: grpo, more_groups: {_type: grpo, num_generations: 16}}
finetuning:
  enabled: true
  num_epochs: 2
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


def test_what_a_target_leaves_out_is_as_the_whole_block_has_it(folder: Path):
    targets = load_config(write(folder, TWO)).finetuning.targets
    assert list(targets) == ["prover", "checker"]
    prover, checker = targets.values()
    assert (prover.model, checker.model) == ("prover", "verifier")
    assert (prover.trajectory_builder, checker.trajectory_builder) == ("groups", "more_groups")
    assert (prover.trainer_adapter, checker.trainer_adapter) == ("local", "local")
    assert prover.reward_function.name == "proved"
    assert prover.target_functions == ["*"]
    assert prover.curriculum_learning == CurriculumLearningConfig()
    assert checker.curriculum_learning == CurriculumLearningConfig(enabled=True)


def test_a_target_by_itself_is_a_block_with_one_model(folder: Path):
    block = load_config(write(folder, TWO)).finetuning.for_target("checker")
    assert block.targets == {}
    assert (block.target_model, block.trajectory_builder) == ("verifier", "more_groups")
    assert block.reward_function.name == "verified"
    assert block.curriculum_learning.enabled
    assert block.num_epochs == 2


@pytest.mark.parametrize(
    ("written", "instead", "message"),
    [
        ("model: verifier", "model: verifyer", "config.yml:14:7: .* 'llms' has no model 'verifyer'"),
        ("checker:", "other:\n      model: judge\n    checker:", "'eval.evaluators' has several"),
        (
            "checker:\n      model: verifier",
            "judge:\n      model: prover",
            "'prover' .*target 'prover' already; .*'llms'",
        ),
        ("more_groups\n", "many_groups\n", "no trajectory builder 'many_groups'; did you mean 'more_groups'"),
        ("name: verified", "name: verify", "no evaluator 'verify'; did you mean"),
        ("prover: {reward", "stranger: {reward", r"'finetuning.targets.stranger.model' is missing"),
        ("checker:", "a/b:", "targets.a/b: .*'-', '_' and '.'"),
        ("every: 2\n", "evry: 2\n", "'finetuning.targets.checker.evry' .*'every'"),
        ("every: 2\n", "every: 0\n", "equal to 1, found 0"),
        ("offset: 1", "offset: 2", r"checker.offset: 2 is beyond the last epoch.*num_epochs' \(2\)"),
        ("  trajectory_builder: groups\n", "", "'trajectory_builders' has several"),
        ("  enabled: true", "  enabled: true\n  target_model: judge", "target_model: .*'finetuning.targets'"),
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
    with pytest.raises(ConfigError, match=r"finetuning.targets: .*frozen"):
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


def test_targets_train_the_functions_that_are_named_for_all(folder: Path):
    text = TWO.replace("  enabled: true", "  enabled: true\n  target_functions: [debate]")
    targets = load_config(write(folder, text)).finetuning.targets
    assert [target.target_functions for target in targets.values()] == [["debate"], ["debate"]]


TALK = [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "2"}]


def parse(tmp_path, warm_up):
    file = tmp_path / "config.yml"
    file.write_text(f"llms: {{policy: {{_type: local, model: m}}}}\nfinetuning:\n  warm_up: {warm_up}\n")
    return load_config(file)


@pytest.mark.parametrize(
    ("warm_up", "problem"),
    [
        ("{transcripts: t.jsonl}", "set either `until` or `steps`"),
        ("{transcripts: t.jsonl, steps: 3, until: {loss: 1}}", "set either `until` or `steps`"),
        ("{transcripts: t.jsonl, until: {}}", "set either `reward` or `loss`"),
        ("{transcripts: t.jsonl, step: 3}", "did you mean 'steps'"),
        ("{transcripts: [[]], steps: 3}", "expected a JSONL file, .* found a list; write conversations"),
    ],
)
def test_a_block_that_cannot_be_is_refused_with_its_line(tmp_path, warm_up, problem):
    (tmp_path / "t.jsonl").write_text(json.dumps({"messages": TALK}))
    with pytest.raises(ConfigError, match=problem) as refused:
        parse(tmp_path, warm_up)
    assert "config.yml:3" in str(refused.value)


def test_a_file_is_found_beside_the_config_and_a_missing_one_matters_in_training_alone(tmp_path):
    (tmp_path / "t.jsonl").write_text(json.dumps({"messages": TALK}))
    config = parse(tmp_path, "{transcripts: t.jsonl, steps: 3}")
    assert config.finetuning.warm_up.transcripts == str(tmp_path / "t.jsonl")
    with pytest.raises(ConfigError, match=r"no file 'u\.jsonl'"):
        parse(tmp_path, "{transcripts: u.jsonl, steps: 3}").check_training()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", r"t\.jsonl:2:1: broken JSON"),
        ('{"messages": [{"role": "user", "content": "x"}]}', r"t\.jsonl:2: .*assistant message"),
        ('{"talk": 1}', r"t\.jsonl:2: messages: Field required"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, problem):
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps({"messages": TALK}) + "\n" + line)
    with pytest.raises(DatasetError, match=problem):
        read_transcripts(str(file), [], 0)


def user_rows(examples, seed):
    """As a user's function: bare messages, and an object with tools."""
    yield [{"role": "user", "content": f"{examples[0].id} {seed}"}, TALK[1]]
    yield {"messages": TALK, "tools": [{"type": "function", "function": {"name": "add"}}]}


def test_a_function_gets_the_examples_and_the_seed(monkeypatch):
    first, second = read_transcripts(f"{__name__}:user_rows", [Example("e1", {})], 7)
    assert first.messages[0]["content"] == "e1 7"
    assert second.tools[0]["function"]["name"] == "add"


def test_steps_are_one_job_and_a_measurement_ends_a_stretch():
    assert WarmUpConfig(transcripts="t", steps=50).next_steps(0) == 50
    assert WarmUpConfig(transcripts="t", steps=50).next_steps(50) == 0
    until = WarmUpConfig(transcripts="t", until={"loss": 1.0}, check_every=20, max_steps=50)
    assert [until.next_steps(done) for done in (0, 20, 40, 50)] == [20, 20, 10, 0]


def test_each_target_has_its_own_or_that_of_all():
    own = {"warm_up": {"transcripts": "t", "steps": 2}}
    block = FinetuneConfig(warm_up={"transcripts": "t", "steps": 1}, targets={"a": own, "b": {}})
    assert [block.for_target(name).warm_up.steps for name in "ab"] == [2, 1]


def test_servers_are_told_of_its_rate_and_batch():
    given = JobHyperparameters(num_epochs=1, learning_rate=2e-3, batch_size=16)
    assert given.for_api("supervised") == {"n_epochs": 1, "learning_rate": 2e-3, "batch_size": 16}


class Refusals(Alarm, name="refusals_for_tests"):
    above: float = 0.1


def alarms(block: Any) -> dict[str, tuple[str, str]]:
    """The type and action of each alarm that a config names."""
    named = parse_config({"finetuning": {"alarms": block}}).finetuning.alarms
    return {name: (alarm.type_name, alarm.action) for name, alarm in named.items()}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("off", ("mismatch", "off")),
        (False, ("mismatch", "off")),
        ("stop", ("mismatch", "stop")),
        ({"above": 0.5}, ("mismatch", "warn")),
        ({"_type": "cut_off_answers", "action": "stop"}, ("cut_off_answers", "stop")),
        ("tests.config.test_targets:Refusals", ("refusals_for_tests", "warn")),
        ({"_type": "tests.config.test_targets:Refusals", "above": 0.3}, ("refusals_for_tests", "warn")),
    ],
)
def test_short_ways_to_write_an_alarm(written, expected):
    assert alarms({"mismatch": written}) == {"mismatch": expected}


def test_all_can_be_turned_off_at_once():
    assert active_alarms(parse_config({"finetuning": {"alarms": "off"}}).finetuning) == {}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("reward_colapse: off", r":4:5: .*'reward_colapse'; did you mean 'reward_collapse'"),
        ("reward_collapse: stopp", r":4:5: .*'stopp' .*an alarm; did you mean 'stop'"),
        ("reward_collapse: {action: stopp}", "should be 'off', 'warn' or 'stop', found"),
        ("entropy_collapse: {bellow: 0.5}", r"entropy_collapse.bellow' .*'below'"),
        ("entropy_collapse: {below: 2}", "less than 1, found 2"),
    ],
)
def test_mistakes_are_named_with_their_line_and_the_nearest_name(tmp_path: Path, line, message):
    (tmp_path / "config.yml").write_text(f"finetuning:\n  enabled: false\n  alarms:\n    {line}\n")
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "config.yml")


def test_a_run_keeps_the_alarms_that_it_was_begun_with():
    block = {"mismatch": "stop", "mine": {"_type": "tests.config.test_targets:Refusals", "above": 0.3}}
    config = parse_config({"finetuning": {"alarms": block}})
    again = parse_config(yaml.safe_load(resolved_yaml(config)))
    assert again.finetuning.alarms == config.finetuning.alarms


def test_overrides_change_an_alarm_however_it_is_written():
    data = {"finetuning": {"alarms": {"mismatch": "stop"}}}
    found = parse_config(data, ["finetuning.alarms.mismatch.above=0.7"]).finetuning.alarms["mismatch"]
    assert (found.action, found.above) == ("stop", 0.7)
    assert (
        parse_config(data, ["finetuning.alarms.mismatch=off"]).finetuning.alarms["mismatch"].action == "off"
    )
