"""The local model and the local adapter in whole runs: what is sampled is trained, and sampled again."""

from __future__ import annotations

import json

import pytest

from etude.config.builder import Builder
from etude.config.load import parse_config
from etude.core.errors import CapabilityError, MissingExtraError, RequestError
from etude.inference import local as local_model
from etude.inference.embedded import EmbeddedEngine
from etude.store.facts import histories_of
from etude.store.run_folder import RunFolder
from etude.verbs import train_in
from tests.models.tiny_models import fresh_policy

AGENT = """
async def play(example, episode):
    question = {"role": "user", "content": example.inputs["question"]}
    first = await episode.chat([question])
    second = await episode.chat([question, first.message, {"role": "user", "content": "sure?"}])
    return first.text + second.text


def varied(example, output):
    return len(set(output)) / 16
"""


def project_of(folder, monkeypatch, module, agent):
    """A folder with an agent's module, examples and a model, which is the current one."""
    monkeypatch.chdir(folder)
    (folder / f"{module}.py").write_text(agent)
    rows = [{"id": f"e{number}", "question": f"what is {number} plus 1?"} for number in range(3)]
    (folder / "train.json").write_text(json.dumps(rows))
    fresh_policy(max_context=128).export(folder / "model")
    return folder


@pytest.fixture
def project(tmp_path, monkeypatch):
    return project_of(tmp_path, monkeypatch, "tests_local_agent", AGENT)


def run_config(epochs, module, **adapter):
    return {
        "llms": {"policy": {"_type": "local", "model": "model", "max_tokens": 8, "device": "cpu"}},
        "workflow": f"{module}:play",
        "eval": {
            "general": {"dataset": "train.json", "max_concurrency": 5},
            "evaluators": {"varied": f"{module}:varied"},
        },
        "trajectory_builders": {"builder": {"_type": "grpo", "num_generations": 3}},
        "trainer_adapters": {"local": {"_type": "local", "learning_rate": 1e-2, "batch_size": 4} | adapter},
        "finetuning": {"enabled": True, "num_epochs": epochs, "deterministic": True, "seed": 7},
    }


def config(epochs=1, builder="grpo", model=None, **adapter):
    data = run_config(epochs, "tests_local_agent", **adapter)
    data["trajectory_builders"]["builder"]["_type"] = builder
    data["llms"]["policy"] = model or data["llms"]["policy"]
    return parse_config(data)


async def trained(project, name, epochs, **changes):
    """The versions of a run, by their digests."""
    with RunFolder.create(project / "runs", name) as run:
        return await go_on(run, epochs, **changes)


async def go_on(run, epochs, **changes):
    await train_in(config(epochs, **changes), run)
    return [entry.version.digest for entry in histories_of(run.path)[None].trained]


async def test_a_run_that_is_taken_up_again_ends_with_the_same_bits(project):
    whole = await trained(project, "whole", 3)
    assert len(set(whole)) == 3
    await trained(project, "cut", 1)
    with RunFolder.open(project / "runs" / "cut") as run:
        assert await go_on(run, 3) == whole


@pytest.mark.parametrize("method", ["dpo", "expert_iteration"])
async def test_other_builders_train_the_same_policy(project, method):
    assert len(await trained(project, "run", 1, builder=method)) == 1


async def test_lora_weights_are_trained_in_a_run(project):
    assert len(set(await trained(project, "run", 2, lora={"r": 2}))) == 2


async def test_the_adapter_trains_the_policy_that_the_engine_samples_from(project):
    with RunFolder.create(project / "runs", "run") as run:
        async with Builder(config(), run) as builder:
            engine = await builder.get_llm("policy")
            adapter = await builder.get_trainer_adapter("local")
            assert isinstance(engine, EmbeddedEngine)
            assert adapter._policy is engine.policy


async def test_a_model_of_another_type_cannot_be_trained_here(project):
    remote = {"_type": "openai", "model_name": "m", "base_url": "http://127.0.0.1:9", "api_key": "k"}
    with (
        RunFolder.create(project / "runs", "run") as run,
        pytest.raises(CapabilityError, match=r"llms.policy is `_type: openai`"),
    ):
        async with Builder(config(model=remote), run) as builder:
            await builder.get_trainer_adapter("local")


async def test_a_model_folder_that_does_not_exist_is_a_wrong_request(project):
    async with Builder(config(model={"_type": "local", "model": "./nowhere"})) as builder:
        with pytest.raises(RequestError, match="the folder does not exist"):
            await builder.get_llm("policy")


def test_without_torch_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(local_model, "find_spec", lambda name: None if name == "torch" else object())
    with pytest.raises(MissingExtraError, match=r"torch not installed.*pip install .*\[local\]"):
        local_model.require_local_extra()
