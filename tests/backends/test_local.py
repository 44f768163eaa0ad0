"""The local model and adapter in whole runs: several targets on one base, and learners in other processes."""

import json
import re
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from etude.backends.cluster_training import Learners
from etude.backends.local import LocalAdapterConfig
from etude.backends.local_adapter import LocalAdapter
from etude.config.builder import Builder
from etude.config.finetuning import FinetuneConfig, TrainerConfig
from etude.config.load import parse_config
from etude.core.errors import CapabilityError, MissingExtraError, RequestError
from etude.core.interfaces import innermost
from etude.core.job import TrainingStatusEnum
from etude.engines import local as local_model
from etude.engines.embedded import EmbeddedEngine, make_decoder
from etude.engines.programs import Command, Launcher, LocalChild, LocalLauncher, Program
from etude.loop.recording_wrappers import assemble_trainer
from etude.models.policy import Policy
from etude.processes.pool import Cluster
from etude.runtime import open_runtime
from etude.store.histories import read_histories
from etude.store.run_folder import RunFolder
from etude.verbs import train_in
from tests.backends.test_local_adapter import CONFIG, collection, finish, not_finite
from tests.models.tiny_models import change_weights, fresh_policy
from tests.support import one_quick

AGENT = """
async def play(example, episode):
    question = {"role": "user", "content": example.inputs["question"]}
    first = await episode.chat([question])
    second = await episode.chat([question, first.message, {"role": "user", "content": "sure?"}])
    return first.text + second.text


def vary(example, output):
    return len(set(output)) / 16
"""


def make_project(folder, monkeypatch, module, agent):
    """A folder with an agent's module, examples and a model, which is the current one."""
    monkeypatch.chdir(folder)
    (folder / f"{module}.py").write_text(agent)
    rows = [{"id": f"e{number}", "question": f"what is {number} plus 1?"} for number in range(2)]
    (folder / "train.json").write_text(json.dumps(rows))
    fresh_policy(max_context=128).export(folder / "model")
    return folder


@pytest.fixture
def project(tmp_path, monkeypatch):
    return make_project(tmp_path, monkeypatch, "tests_local_agent", AGENT)


def run_config(epochs, module, **adapter):
    return {
        "llms": {"policy": {"_type": "local", "model": "model", "max_tokens": 8, "device": "cpu"}},
        "workflow": f"{module}:play",
        "eval": {
            "general": {"dataset": "train.json", "max_concurrency": 5},
            "evaluators": {"vary": f"{module}:vary"},
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


async def test_with_a_trainer_of_ones_own_a_failed_job_leaves_the_sampled_weights_as_they_were(project):
    """Though its first step changed them, and versions are seldom written: that trainer may go on."""

    class OwnTrainerConfig(TrainerConfig, name="tests_own_loop"):
        """A trainer that goes on after a failed job."""

    of = config(batch_size=1, checkpoint_seconds=1e9)
    block = of.finetuning.model_copy(update={"trainer": "own"})
    of = of.model_copy(update={"trainers": {"own": OwnTrainerConfig()}, "finetuning": block})
    with RunFolder.create(project / "runs", "run") as run:
        async with Builder(of, run) as builder:
            engine = innermost(await builder.get_llm("policy"))
            adapter = await builder.get_trainer_adapter("local")
            assert isinstance(engine, EmbeddedEngine) and adapter._policy is engine.policy
            await adapter.initialize(block)
            version = await finish(adapter, collection("one"))
            steps = adapter._workplace.learner.step
            status = await adapter.wait_until_complete(await adapter.submit(not_finite("two")))
            assert status.status is TrainingStatusEnum.FAILED
            assert (engine.policy.version, engine.policy.digest()) == (1, version.digest)
            assert adapter._workplace.learner.step == steps
            assert (await finish(adapter, collection("three"))).number == 2


async def test_a_model_of_another_type_cannot_be_trained_here(project):
    remote = {"_type": "openai", "model_name": "m", "base_url": "http://127.0.0.1:9", "api_key": "k"}
    with (
        RunFolder.create(project / "runs", "run") as run,
        pytest.raises(CapabilityError, match=r"llms.policy is `_type: openai`"),
    ):
        async with Builder(config(model=remote), run) as builder:
            await builder.get_trainer_adapter("local")


@pytest.mark.parametrize("adapter", ["local", "openai"])
async def test_of_several_models_one_is_named(project, adapter):
    model = {"_type": "openai", "model_name": "m", "base_url": "http://127.0.0.1:9", "api_key": "k"}
    data = {"llms": {"a": model, "b": model}, "trainer_adapters": {"own": {"_type": adapter}}}
    with pytest.raises(RequestError, match=r"finetuning\.target_model"):
        async with Builder(parse_config(data)) as builder:
            await builder.get_trainer_adapter("own")


def test_without_torch_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(local_model, "find_spec", lambda name: None if name == "torch" else object())
    with pytest.raises(MissingExtraError, match=r"torch not installed.*pip install .*\[local\]"):
        local_model.require_local_extra()


TWO_AGENTS = """
async def play(example, episode):
    question = {"role": "user", "content": example.inputs["question"]}
    claim = await episode.chat([question], model="prover")
    doubt = {"role": "user", "content": "sure?"}
    verdict = await episode.chat([question, claim.message, doubt], model="verifier")
    return {"claim": claim.text, "verdict": verdict.text}


def vary(example, output):
    return len(set(output["claim"])) / 16


def brief(example, output):
    return -len(output["verdict"].encode()) / 16
"""

LORA = {"lora": {"r": 4, "alpha": 8}}


@pytest.fixture
def shared_project(tmp_path, monkeypatch):
    return make_project(tmp_path, monkeypatch, "tests_shared_agent", TWO_AGENTS)


def two_models(llms, targets, **adapter):
    data = run_config(2, "tests_shared_agent", **adapter)
    data["llms"] = {name: data["llms"]["policy"] | {"model": model} for name, model in llms.items()}
    data["eval"]["evaluators"] = {name: f"tests_shared_agent:{name}" for name in ("vary", "brief")}
    data["finetuning"]["targets"] = {
        "prover": {"reward_function": {"name": "vary"}} | targets.get("prover", {}),
        "verifier": {"reward_function": {"name": "brief"}} | targets.get("verifier", {}),
    }
    return parse_config(data)


def one_base(**adapter):
    return two_models(dict.fromkeys(("base", "prover", "verifier"), "model"), {}, **adapter)


async def trained_together(shared_project, name, of):
    with RunFolder.create(shared_project / "runs", name) as run:
        await train_in(of, run)
        return {
            target: [entry.version.digest for entry in history.trained_epochs]
            for target, history in read_histories(run.path).items()
        }


@pytest.mark.parametrize("adapter", one_quick(LORA, {}), ids=["LoRA weights", "all weights"])
async def test_targets_of_one_base_get_the_weights_that_they_would_with_a_base_each(shared_project, adapter):
    shutil.copytree("model", "copy")
    together = await trained_together(shared_project, "together", one_base(**adapter))
    apart = await trained_together(
        shared_project, "apart", two_models({"prover": "model", "verifier": "copy"}, {}, **adapter)
    )
    assert together == apart
    assert [len(digests) for digests in together.values()] == [2, 2]
    assert len({digest for digests in together.values() for digest in digests}) == 4


def storages(policies):
    """The bytes of all numbers in memory, by where they are."""
    tensors = [value for policy in policies for value in policy.model.parameters()]
    return {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in tensors}


async def initialize(shared_project, of):
    """The policies of a run whose adapters have been initialised, by their entries of `llms`."""
    with RunFolder.create(shared_project / "runs", "run") as run:
        async with open_runtime(of, run) as runtime:
            trainer = await assemble_trainer(runtime)
            await trainer.initialize(of.finetuning)
            yield {name: innermost(engine).policy for name, engine in runtime.engines.items()}


async def test_lora_targets_have_one_base_in_memory(shared_project):
    async for policies in initialize(shared_project, one_base(**LORA)):
        assert list(policies) == ["base", "prover", "verifier"]
        lora = [
            sum(value.nbytes for value in policies[name].trainable().values())
            for name in ("prover", "verifier")
        ]
        base = sum(storages([policies["base"]]).values())
        assert sum(storages(policies.values()).values()) == base + sum(lora)
        assert len({id(policy.lock) for policy in policies.values()}) == 3


async def test_targets_that_train_all_weights_take_a_copy_and_leave_the_base_alone(shared_project):
    async for policies in initialize(shared_project, one_base()):
        before = policies["base"].digest()
        change_weights(policies["prover"], lambda one: one.add_(1.0))
        policies["base"].mark_changed(0)
        assert policies["base"].digest() == before
        assert len(storages(policies.values())) == 3 * len(storages([policies["base"]]))


def test_a_large_base_that_is_shared_has_no_copies_that_are_faster(monkeypatch):
    first = fresh_policy()
    first.share_tensors()
    assert make_decoder(first, slots=2, deterministic=False)._fused is not None
    monkeypatch.setattr("etude.engines.decoder._COPIED", 1000)
    assert make_decoder(first, slots=2, deterministic=False)._fused is None
    assert make_decoder(fresh_policy(), slots=2, deterministic=False)._fused is not None


@pytest.fixture(scope="module")
def shared_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    fresh_policy().export(folder)
    return folder


class Counted(LocalLauncher):
    """Starts processes on this machine; what `change` makes of them."""

    def __init__(self, change: Callable[[Command], Command]) -> None:
        super().__init__()
        self.change, self.started = change, 0

    async def launch(self, program: Program, log: Path) -> LocalChild:
        self.started += 1
        return await super().launch(self.change(program.command("127.0.0.1")), log)


async def adapter_on(
    shared_model: Path, folder: Path, change: Callable[[Command], Command] | None = None
) -> tuple[LocalAdapter, Counted]:
    """An adapter, with a team of one if its process is changed."""
    launcher = Counted(change or (lambda command: command))

    @asynccontextmanager
    async def places(count: int, *, on_gpus: bool) -> AsyncIterator[list[Launcher]]:
        yield [launcher] * count

    learners = None
    if change is not None:
        (folder / "learners").mkdir(parents=True)
        learners = Learners(Cluster(None, learners=places), 1, folder / "learners", "cpu")
    policy = Policy.load(shared_model, device="cpu")
    adapter = LocalAdapter(LocalAdapterConfig(**CONFIG), policy, folder, 5, learners)
    await adapter.initialize(FinetuneConfig())
    return adapter, launcher


async def test_learners_that_end_three_times_without_a_checkpoint_fail_the_job(
    shared_model: Path, tmp_path: Path
):
    """The first one makes a checkpoint, so that its end does not count."""
    program = "import json, pathlib; _, _, (_, job) = json.loads(input())"
    program += "; pathlib.Path(job, 'step-1').mkdir(exist_ok=True); print('no room'); raise SystemExit(3)"

    def replace_program(command: Command) -> Command:
        return replace(command, words=(sys.executable, "-c", program))

    adapter, launcher = await adapter_on(shared_model, tmp_path, replace_program)
    status = await adapter.wait_until_complete(await adapter.submit(collection("one")))
    assert status.status is TrainingStatusEnum.FAILED and launcher.started == 4
    assert re.search(r"3 times .*checkpoint \(process 0 .*exit code 3\).*no room", str(status.message))
