"""Several LoRA targets on one base: one copy of it in memory, and the weights of runs with a base each."""

from __future__ import annotations

import shutil

import pytest
import torch

from etude.config.load import parse_config
from etude.core.errors import ConfigError
from etude.core.interfaces import bare
from etude.inference.decoder import make_decoder
from etude.loop.targets import assemble_trainer
from etude.runtime import open_runtime
from etude.store.facts import histories_of
from etude.store.run_folder import RunFolder
from etude.verbs import train_in
from tests.backends.test_local import project_of, run_config
from tests.models.tiny_models import fresh_policy

AGENT = """
async def play(example, episode):
    question = {"role": "user", "content": example.inputs["question"]}
    claim = await episode.chat([question], model="prover")
    doubt = {"role": "user", "content": "sure?"}
    verdict = await episode.chat([question, claim.message, doubt], model="verifier")
    return {"claim": claim.text, "verdict": verdict.text}


def varied(example, output):
    return len(set(output["claim"])) / 16


def brief(example, output):
    return -len(output["verdict"].encode()) / 16
"""

LORA = {"lora": {"r": 4, "alpha": 8}}


@pytest.fixture
def project(tmp_path, monkeypatch):
    return project_of(tmp_path, monkeypatch, "tests_shared_agent", AGENT)


def config(llms, targets, **adapter):
    data = run_config(2, "tests_shared_agent", **adapter)
    data["llms"] = {name: data["llms"]["policy"] | {"model": model} for name, model in llms.items()}
    data["eval"]["evaluators"] = {name: f"tests_shared_agent:{name}" for name in ("varied", "brief")}
    data["finetuning"]["targets"] = {
        "prover": {"reward_function": {"name": "varied"}} | targets.get("prover", {}),
        "verifier": {"reward_function": {"name": "brief"}} | targets.get("verifier", {}),
    }
    return parse_config(data)


def one_entry(**adapter):
    return config({"base": "model"}, {name: {"model": "base"} for name in ("prover", "verifier")}, **adapter)


async def trained(project, name, of):
    with RunFolder.create(project / "runs", name) as run:
        await train_in(of, run)
        return {
            target: [entry.version.digest for entry in history.trained]
            for target, history in histories_of(run.path).items()
        }


@pytest.mark.parametrize("adapter", [LORA, {}], ids=["LoRA weights", "all weights"])
async def test_targets_of_one_entry_get_the_weights_that_they_would_with_a_base_each(project, adapter):
    shutil.copytree("model", "copy")
    together = await trained(project, "together", one_entry(**adapter))
    apart = await trained(project, "apart", config({"prover": "model", "verifier": "copy"}, {}, **adapter))
    assert together == apart
    assert [len(digests) for digests in together.values()] == [2, 2]
    assert len({digest for digests in together.values() for digest in digests}) == 4


def storages(policies):
    """The bytes of all numbers in memory, by where they are."""
    tensors = [value for policy in policies for value in policy.model.parameters()]
    return {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in tensors}


async def initialized(project, of):
    """The policies of a run whose adapters have been initialised, by their entries of `llms`."""
    with RunFolder.create(project / "runs", "run") as run:
        async with open_runtime(of, run) as runtime:
            trainer = await assemble_trainer(runtime)
            await trainer.initialize(runtime.config.finetuning)
            yield {name: bare(engine).policy for name, engine in runtime.engines.items()}


async def test_lora_targets_have_one_base_in_memory(project):
    async for policies in initialized(project, one_entry(**LORA)):
        assert list(policies) == ["base", "prover", "verifier"]
        lora = [
            sum(value.nbytes for value in policies[name].trainable().values())
            for name in ("prover", "verifier")
        ]
        base = sum(storages([policies["base"]]).values())
        assert sum(storages(policies.values()).values()) == base + sum(lora)
        assert len({id(policy.lock) for policy in policies.values()}) == 3


async def test_targets_that_train_all_weights_take_a_copy_and_leave_the_base_alone(project):
    async for policies in initialized(project, one_entry()):
        before = policies["base"].digest()
        with torch.no_grad():
            for value in policies["prover"].trainable().values():
                value.add_(1.0)
        policies["base"].mark_changed(0)
        assert policies["base"].digest() == before
        assert len(storages(policies.values())) == 3 * len(storages([policies["base"]]))


def test_a_target_called_like_another_entry_is_refused():
    both = {name: {"model": "base"} for name in ("prover", "verifier")}
    with pytest.raises(ConfigError, match="trained by the target 'prover' already; give the targets names"):
        config({"base": "model", "verifier": "model"}, both)


def test_a_large_base_that_is_shared_has_no_copies_that_are_faster(monkeypatch):
    first = fresh_policy()
    first.beside()
    assert make_decoder(first, slots=2, deterministic=False)._fused is not None
    monkeypatch.setattr("etude.inference.slot_decoder._COPIED", 1000)
    assert make_decoder(first, slots=2, deterministic=False)._fused is None
    assert make_decoder(fresh_policy(), slots=2, deterministic=False)._fused is not None
