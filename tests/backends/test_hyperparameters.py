"""Hyperparameters of jobs reach them, or are refused by name; and what the interface does for adapters."""

from types import SimpleNamespace

import pytest

from etude.algorithms.algorithm import changed_options
from etude.algorithms.dpo import Dpo
from etude.algorithms.grpo import Grpo
from etude.backends.local_adapter import LocalAdapter, learner_options
from etude.backends.trainer_adapter import Capabilities, JobHyperparameters, LocalAdapterConfig, check_run
from etude.config.finetuning import FinetuneConfig, LoraOptions
from etude.core.errors import CapabilityError
from etude.engines.local import OpponentsConfig
from etude.learner.optimiser import Schedule
from etude.server.job_request import MethodBody, job_algorithm, resolve_hyperparameters
from tests.backends.lm_stand_in import LmStandIn
from tests.backends.openai_stand_in import StandIn
from tests.backends.test_local_adapter import CONFIG, adapter_on, collection, finish
from tests.backends.test_openai_jobs import backend, dpo, imitations
from tests.models.tiny_models import fresh_policy
from tests.training import FakeAdapter


def hyperparameters_for(method, **given):
    """The hyperparameters of a server's job, as its request names them."""
    return MethodBody.model_validate({"type": method, method: {"hyperparameters": given}}).hyperparameters


ALL = JobHyperparameters(num_epochs=7, rl_learning_rate=3e-4, dpo_beta=0.9, lora_rank=4, lora_alpha=8.0)


async def test_openai_takes_epochs_and_beta_and_names_what_it_does_not():
    server = StandIn()
    adapter = backend(server, hyperparameters={"n_epochs": 2})
    with pytest.raises(
        CapabilityError, match=r"'openai' cannot be given rl_learning_rate \(0.0003\), lora_rank"
    ):
        adapter.use_hyperparameters(ALL)
    adapter.use_hyperparameters(JobHyperparameters(num_epochs=7, dpo_beta=0.9))
    await adapter.submit(dpo())
    sent = server.jobs["ftjob-0"]["method"]["dpo"]["hyperparameters"]
    assert (sent["n_epochs"], sent["beta"]) == (7, 0.9)


async def test_a_server_takes_all_before_those_of_the_config():
    server = LmStandIn()
    adapter = server.adapter(hyperparameters={"n_epochs": 2, "learning_rate": 0.1, "lora_rank": 2})
    adapter.use_hyperparameters(ALL)
    for data in (dpo(), imitations()):
        await adapter.submit(data)
    preferred, imitated = (job["method"] for job in server.jobs.values())
    shared = {"n_epochs": 7, "lora_rank": 4, "lora_alpha": 8.0}
    assert (
        preferred["dpo"]["hyperparameters"].items() >= (shared | {"learning_rate": 3e-4, "beta": 0.9}).items()
    )
    # The learning rate of reinforcement learning is none of imitation.
    assert imitated["supervised"]["hyperparameters"].items() >= (shared | {"learning_rate": 0.1}).items()


def test_the_learning_rate_that_nobody_gave_is_that_of_what_is_trained():
    whole, lora = LocalAdapterConfig(), LocalAdapterConfig(lora=LoraOptions())
    assert (whole.rate, lora.rate) == (1e-5, 3e-4)
    assert whole.for_job("samples", JobHyperparameters(lora_rank=4)).rate == 3e-4
    assert lora.for_job("samples", JobHyperparameters(lora_rank=0)).rate == 1e-5
    assert LocalAdapterConfig(learning_rate=1e-4, lora=LoraOptions()).rate == 1e-4


async def test_in_this_process_they_are_those_of_the_next_job(tmp_path):
    weights = []
    for name, given in [
        ("config", JobHyperparameters(num_epochs=3, rl_learning_rate=2e-3)),
        ("other", JobHyperparameters(num_epochs=3, rl_learning_rate=3e-3)),
    ]:
        adapter = await adapter_on(tmp_path / name)
        adapter.use_hyperparameters(given)
        weights.append((await finish(adapter, collection("one"))).digest)
    same = await adapter_on(tmp_path / "same", passes=3, learning_rate=2e-3)
    assert [(await finish(same, collection("one"))).digest == one for one in weights] == [True, False]


async def test_lora_weights_are_put_on_the_model_when_it_is_initialized(tmp_path):
    adapter = LocalAdapter(LocalAdapterConfig(**CONFIG), fresh_policy(), tmp_path, seed=5)
    adapter.use_hyperparameters(JobHyperparameters(lora_rank=4, lora_alpha=8.0))
    await adapter.initialize(FinetuneConfig())
    ranks = {value.shape[0] for name, value in adapter._policy.trainable().items() if "lora_A" in name}
    assert ranks == {4}
    adapter.use_hyperparameters(JobHyperparameters(lora_rank=4, lora_alpha=8.0, num_epochs=2))
    as_configured = await adapter_on(tmp_path / "same", lora=LoraOptions(r=4, alpha=6))
    as_configured.use_hyperparameters(JobHyperparameters(lora_rank=4, lora_alpha=6.0))
    with pytest.raises(CapabilityError, match=r"trains LoRA weights of rank 4 and alpha 8 since.*rank 5"):
        adapter.use_hyperparameters(JobHyperparameters(lora_rank=5, lora_alpha=8.0))
    with pytest.raises(CapabilityError, match=r"alpha 8 .*all weights.*lora_rank"):
        adapter.use_hyperparameters(JobHyperparameters(lora_rank=0))


def test_an_adapter_that_does_not_say_takes_none(tmp_path):
    adapter = FakeAdapter(tmp_path / "jobs")
    adapter.use_hyperparameters(JobHyperparameters())
    with pytest.raises(CapabilityError, match=r"'fake' cannot be given num_epochs \(7\), rl_learning_rate"):
        adapter.use_hyperparameters(ALL)


@pytest.mark.parametrize(
    ("run", "trainings"),
    [({"num_epochs": 7}, 7), ({"num_epochs": 7, "fine_tune_from_scratch": True}, 1)],
    ids=["of the run", "every job from the base"],
)
def test_the_learning_rate_falls_over_the_epochs(run, trainings):
    config = LocalAdapterConfig(lr_schedule="cosine", warmup_steps=2)
    found = learner_options(config, FinetuneConfig(**run)).schedule
    assert found == Schedule("cosine", 2, trainings)


@pytest.mark.parametrize(
    "algorithm",
    [
        Dpo(reference="base"),
        Dpo(reference="base", beta=0.3),
        Grpo(variant="gspo"),
        Grpo(correction="mask", beta=0.1),
    ],
    ids=range(4),
)
def test_a_job_of_the_server_has_the_same_loss(algorithm):
    method = algorithm.type_name
    options = {name: value for name, value in changed_options(algorithm).items() if name != "reference"}
    values = resolve_hyperparameters(method, hyperparameters_for(method, **options), 4)
    assert job_algorithm(method, values) == algorithm


TEXTS = frozenset({"supervised", "dpo"})


@pytest.mark.parametrize(
    ("able", "block", "told"),
    [
        ({"methods": TEXTS}, {}, "'grpo' .*'grpo', .*'a' .*: dpo, supervised"),
        ({}, {"fine_tune_from_scratch": True}, "'fine_tune_from_scratch' .*'a' .*last version"),
        ({"methods": ["grpo"]}, {"warm_up": {"transcripts": "t", "steps": 1}}, "cannot imitate"),
        ({"versions": True, "old_versions": False}, {}, r"keeps no earlier versions.*llms\.opponent"),
    ],
)
def test_what_a_backend_cannot_do_is_refused(able, block, told):
    builder, asked = SimpleNamespace(method="grpo", trajectory_builder_config=Grpo()), FinetuneConfig(**block)
    can = Capabilities(versions=True, from_base=True)
    check_run("'a'", can, builder, asked, llms := {"opponent": OpponentsConfig(of="policy")}, "policy")
    with pytest.raises(CapabilityError, match=told):
        check_run("'a'", Capabilities(**able), builder, asked, llms, "policy")
