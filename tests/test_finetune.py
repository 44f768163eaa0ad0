"""Whole runs from a config: the builder, the registry and every room below in one."""

import json
from collections.abc import AsyncIterator

import pytest
from pydantic import Field

from etude.backends.capabilities import Capabilities
from etude.config.builder import Builder
from etude.config.component import LlmConfig
from etude.config.finetuning import TrainerAdapterConfig
from etude.config.load import parse_config
from etude.config.registry import register_llm, register_trainer_adapter
from etude.core.call import Sampling
from etude.core.errors import CapabilityError, RequestError, TrainingError
from etude.core.job import TrainingStatusEnum
from etude.finetune import finetune
from etude.runtime import open_runtime
from etude.store.run_folder import RunFolder
from tests.careless_trainer import CarelessTrainerConfig
from tests.support import ScriptedEngine
from tests.training import FakeAdapter, learning_engine


class LearnerConfig(LlmConfig, name="test_learner"):
    """A model that learns by version."""

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=0.5)


@register_llm(config_type=LearnerConfig)
async def learner(config: LearnerConfig, builder: Builder) -> AsyncIterator[ScriptedEngine]:
    engine = learning_engine()
    yield engine
    await engine.close()


class BackendConfig(TrainerAdapterConfig, name="test_backend"):
    methods: list[str] = Field(default=["grpo", "dpo", "supervised"])


@register_trainer_adapter(config_type=BackendConfig)
async def backend(config: BackendConfig, builder: Builder) -> AsyncIterator[FakeAdapter]:
    capabilities = Capabilities(methods=frozenset(config.methods), versions=True)
    yield FakeAdapter(builder.run.path / "backend", capabilities=capabilities)


AGENT = """
async def play(example, episode):
    reply = await episode.chat([{"role": "user", "content": example.inputs["question"]}])
    return reply.text


def correct(example, output):
    return float(output == example.expected)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests_finetune_agent.py").write_text(AGENT)
    for name, prefix in (("train", "t"), ("held_out", "v")):
        rows = [{"id": f"{prefix}{n}", "question": f"{prefix}{n}?", "answer": "yes"} for n in range(4)]
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    return tmp_path


def config(**changes):
    data = {
        "llms": {"policy": {"_type": "test_learner"}},
        "workflow": "tests_finetune_agent:play",
        "eval": {
            "general": {"dataset": "train.json"},
            "evaluators": {"correct": "tests_finetune_agent:correct"},
        },
        "trajectory_builders": {"groups": {"_type": "grpo", "num_generations": 4}},
        "trainer_adapters": {"backend": {"_type": "test_backend"}},
        "finetuning": {
            "enabled": True,
            "num_epochs": 2,
            "run_configuration": {"validation_dataset": "held_out.json"},
        },
    }
    return parse_config(data | changes)


async def test_a_config_becomes_a_trained_run(project):
    with RunFolder.create(project, "run") as run:
        outcome = await finetune(config(), run)
    assert [status.status for status in outcome.statuses] == [TrainingStatusEnum.COMPLETED] * 2
    assert outcome.summary["measured_on"] == "validation"
    assert json.loads((project / "run" / "summary.json").read_text()) == outcome.summary
    assert (project / "run" / "reward_plot.png").exists()


async def test_a_run_folder_is_gone_on_with(project):
    with RunFolder.create(project, "run") as run:
        first = await finetune(config(), run)
    with RunFolder.open(project / "run") as run:
        assert (await finetune(config(), run)).summary == first.summary


async def test_the_runtime_has_examples_models_and_their_sampling(project):
    with RunFolder.create(project, "run") as run:
        async with open_runtime(config(), run) as runtime:
            assert [example.id for example in runtime.examples] == ["t0", "t1", "t2", "t3"]
            assert [example.id for example in runtime.validation_examples] == ["v0", "v1", "v2", "v3"]
            engine = runtime.engines["policy"]
            await runtime.evaluation.run(runtime.examples, phase="eval")
        assert {request.sampling.temperature for request in engine.requests} == {0.5}
        assert engine.closed


async def test_an_engine_that_is_handed_in_takes_the_place_of_the_configs(project):
    other = learning_engine()
    with RunFolder.create(project, "run") as run:
        async with open_runtime(config(), run, engines={"policy": other}) as runtime:
            assert runtime.engines["policy"] is other
    assert not other.closed


async def test_what_the_backend_cannot_do_is_refused_before_anything_is_sampled(project):
    engine = learning_engine()
    changes = {"trainer_adapters": {"backend": {"_type": "test_backend", "methods": ["supervised"]}}}
    with RunFolder.create(project, "run") as run, pytest.raises(CapabilityError, match="supervised"):
        await finetune(config(**changes), run, engines={"policy": engine})
    assert engine.requests == []


async def test_finetuning_must_be_enabled(project):
    with (
        RunFolder.create(project, "run") as run,
        pytest.raises(RequestError, match=r"finetuning.enabled: true"),
    ):
        await finetune(config(finetuning={"enabled": False}), run)


@pytest.mark.parametrize(
    ("status", "error"),
    [(None, "returned no training job"), ("failed", "job job .* ended as 'failed': no luck")],
)
async def test_a_trainer_that_returns_failures_fails(project, status, error):
    changes = {"trainers": {"mine": {"_type": CarelessTrainerConfig.type_name, "status": status}}}
    with RunFolder.create(project, "run") as run, pytest.raises(TrainingError, match=error):
        await finetune(config(**changes), run)


async def test_a_trainer_that_somebody_else_wrote_may_succeed(project):
    changes = {"trainers": {"mine": {"_type": CarelessTrainerConfig.type_name, "status": "completed"}}}
    with RunFolder.create(project, "run") as run:
        outcome = await finetune(config(**changes), run)
    assert len(outcome.statuses) == 1
