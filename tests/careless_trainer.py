"""A trainer that somebody else wrote."""

from collections.abc import AsyncIterator

from etude.config.builder import Builder
from etude.config.finetuning import TrainerConfig
from etude.config.registry import register_trainer
from etude.core.job import TrainingJobStatus, TrainingStatusEnum
from etude.loop.interface import Trainer


class CarelessTrainerConfig(TrainerConfig, name="test_careless"):
    status: str | None = None


class CarelessTrainer(Trainer):
    """Returns what went wrong instead of raising it."""

    async def run_epoch(self, epoch, run_id):
        """Not used."""

    async def run(self, num_epochs):
        if self.trainer_config.status is None:
            return []
        status = TrainingStatusEnum(self.trainer_config.status)
        return [TrainingJobStatus(run_id="job", backend="b", status=status, message="no luck")]

    async def get_metrics(self, run_id):
        return {}

    async def cleanup(self):
        """Nothing to free."""

    def log_progress(self, epoch, metrics, output_dir=None):
        """Nothing to log."""


@register_trainer(config_type=CarelessTrainerConfig)
async def careless(config: CarelessTrainerConfig, builder: Builder) -> AsyncIterator[CarelessTrainer]:
    yield CarelessTrainer(config)
