"""An adapter that overrides nothing: how much the interface does for it."""

import pytest

from etude.backends.capabilities import Capabilities, check_method
from etude.backends.trainer_adapter import TrainerAdapter
from etude.config.finetuning import FinetuneConfig, RewardFunctionConfig, TrainerAdapterConfig
from etude.core.errors import CapabilityError
from etude.core.job import ModelVersion, TrainingJobRef, TrainingJobStatus, TrainingStatusEnum


class Smallest(TrainerAdapter):
    async def is_healthy(self):
        return True

    async def submit(self, trajectories):
        return TrainingJobRef(run_id=trajectories.run_id, backend="smallest")

    async def status(self, ref):
        return TrainingJobStatus(run_id=ref.run_id, backend="smallest", status=TrainingStatusEnum.COMPLETED)

    async def wait_until_complete(self, ref, poll_interval=10.0):
        return await self.status(ref)

    def log_progress(self, ref, metrics, output_dir=None):
        """Nothing to record."""


async def test_the_hooks_have_defaults_that_do_no_harm():
    adapter = Smallest(TrainerAdapterConfig())
    await adapter.initialize(FinetuneConfig(reward_function=RewardFunctionConfig(name="correct")))
    ref = TrainingJobRef(run_id="job", backend="smallest")
    version = ModelVersion(number=1, location="here", digest="d")
    assert adapter.adapter_config.reward.name == "correct"
    assert adapter.capabilities() == Capabilities()
    assert await adapter.current_version() is None
    await adapter.restore(version)
    await adapter.prune([version])
    await adapter.cancel(ref)
    await adapter.cleanup()
    assert (await adapter.wait_until_complete(ref)).status is TrainingStatusEnum.COMPLETED


def test_an_adapter_that_does_not_say_can_do_every_method():
    for method in ("grpo", "dpo", "supervised"):
        check_method("'mine'", Capabilities(), method, "'builder'")


def test_a_method_that_is_missing_is_an_error_with_those_that_are_there():
    with pytest.raises(CapabilityError, match=r"'b' makes data .* 'grpo', .* 'a' can do: dpo, supervised"):
        check_method("'a'", Capabilities(methods=frozenset({"supervised", "dpo"})), "grpo", "'b'")
