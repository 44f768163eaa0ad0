"""The `warm_up` block: what is refused, where transcripts come from, and who can imitate them."""

import json

import pytest

from etude.backends.capabilities import Capabilities, JobHyperparameters, check_block
from etude.config.finetuning import FinetuneConfig, WarmUpConfig, read_transcripts
from etude.config.load import load_config
from etude.core.episode import Example
from etude.core.errors import CapabilityError, ConfigError, DatasetError

TALK = [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "2"}]


def parse(tmp_path, warm_up):
    file = tmp_path / "config.yml"
    file.write_text(f"llms: {{policy: {{_type: local, model: m}}}}\nfinetuning:\n  warm_up: {warm_up}\n")
    return load_config(file)


@pytest.mark.parametrize(
    ("warm_up", "problem"),
    [
        ("{transcripts: t.jsonl}", "set `until` or `steps`"),
        ("{transcripts: t.jsonl, steps: 3, until: {loss: 1}}", "set `until` or `steps`"),
        ("{transcripts: t.jsonl, until: {}}", "set `reward` or `loss`"),
        ("{transcripts: t.jsonl, step: 3}", "did you mean 'steps'"),
        ("[{transcripts: t.jsonl, steps: 1, batch: 3}]", "did you mean 'batch_size'"),
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
    assert config.finetuning.warm_ups[0].transcripts == str(tmp_path / "t.jsonl")
    with pytest.raises(ConfigError, match=r"there is no file 'u\.jsonl'"):
        parse(tmp_path, "[{transcripts: u.jsonl, steps: 3}]").check_training()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", r"t\.jsonl:2:1: broken JSON"),
        (
            '{"messages": [{"role": "user", "content": "x"}]}',
            r"t\.jsonl:2: .*no message of the role assistant",
        ),
        ('{"talk": 1}', r"t\.jsonl:2: messages: Field required"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, problem):
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps({"messages": TALK}) + "\n" + line)
    with pytest.raises(DatasetError, match=problem):
        read_transcripts(str(file), [], 0)


def seeded(examples, seed):
    """As a user's function: bare messages, and an object with tools."""
    yield [{"role": "user", "content": f"{examples[0].id} {seed}"}, TALK[1]]
    yield {"messages": TALK, "tools": [{"type": "function", "function": {"name": "add"}}]}


def test_a_function_gets_the_examples_and_the_seed(monkeypatch):
    first, second = read_transcripts(f"{__name__}:seeded", [Example("e1", {})], 7)
    assert first.messages[0]["content"] == "e1 7"
    assert second.tools[0]["function"]["name"] == "add"


def test_steps_are_one_job_and_a_measurement_ends_a_stretch():
    assert WarmUpConfig(transcripts="t", steps=50).next_steps(0) == 50
    assert WarmUpConfig(transcripts="t", steps=50).next_steps(50) == 0
    until = WarmUpConfig(transcripts="t", until={"loss": 1.0}, min_steps=30, check_every=20, max_steps=60)
    assert [until.next_steps(done) for done in (0, 30, 50, 60)] == [30, 20, 10, 0]


def test_each_target_has_its_own_or_that_of_all():
    stage = {"transcripts": "t", "steps": 1}
    block = FinetuneConfig(
        warm_up=stage, targets={"a": {"warm_up": [stage, stage]}, "b": {}, "c": {"warm_up": []}}
    )
    assert [len(block.for_target(name).warm_ups) for name in "abc"] == [2, 1, 0]


def test_a_backend_that_cannot_imitate_text_is_refused_by_name():
    block = FinetuneConfig(warm_up={"transcripts": "t", "steps": 1})
    check_block("'local'", Capabilities(), block)
    for capabilities in (Capabilities(transcripts=False), Capabilities(methods=frozenset({"grpo"}))):
        with pytest.raises(CapabilityError, match=r"'finetuning\.warm_up' .*'openpipe_art' cannot"):
            check_block("'openpipe_art'", capabilities, block)
        check_block("'openpipe_art'", capabilities, FinetuneConfig())


def test_servers_are_told_of_its_rate_and_batch():
    given = JobHyperparameters(num_epochs=1, learning_rate=2e-3, batch_size=16)
    assert given.for_api("supervised") == {"n_epochs": 1, "learning_rate": 2e-3, "batch_size": 16}
