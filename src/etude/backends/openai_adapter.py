"""Training at OpenAI through its fine-tuning API: `_type: openai`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from pydantic import Field

from etude.backends.capabilities import Capabilities
from etude.backends.openai_api import JobsConfig, connect, run_key, trained_model, training_file
from etude.backends.openai_jobs import OpenAiJobs
from etude.config.finetuning import FinetuneConfig
from etude.config.registry import register_trainer_adapter
from etude.core.conversion import TrajectoryCollection
from etude.core.job import Skipped

if TYPE_CHECKING:
    from etude.config.builder import Builder


class OpenAiAdapterConfig(JobsConfig, name="openai"):
    """Train at OpenAI, through its fine-tuning API."""

    min_rows: int = Field(default=10, ge=1)
    """The fewest rows that a job trains on. The API refuses files with fewer."""

    @property
    def epochs(self) -> int:
        """The number of passes over the data: for `auto`, OpenAI's choice for a few hundred rows."""
        given = self.hyperparameters.get("n_epochs", "auto")
        return 3 if given == "auto" else int(given)


_FEWEST_BYTES_PER_TOKEN = 3
"""For the upper bound of a job's tokens."""


class OpenAiAdapter(OpenAiJobs):
    """Jobs at OpenAI: supervised and DPO."""

    adapter_config: OpenAiAdapterConfig

    async def initialize(self, run_config: FinetuneConfig) -> None:
        await super().initialize(run_config)
        await self.check()

    def capabilities(self) -> Capabilities:
        # There is no `grpo`: OpenAI accepts no rewards of others.
        return Capabilities(
            methods=frozenset({"supervised", "dpo"}),
            options=frozenset({"beta"}),
            versions=True,
            from_base=True,
        )

    def prepare(self, trajectories: TrajectoryCollection) -> TrajectoryCollection:
        """Return the collection with the only option that OpenAI takes, which is DPO's `beta`."""
        options = {name: value for name, value in trajectories.options.items() if name == "beta"}
        return trajectories.model_copy(update={"options": options})

    def reason_to_skip(self, trajectories: TrajectoryCollection, rows: int) -> Skipped | None:
        """Return that there are too few rows, if so."""
        least = self.adapter_config.min_rows
        if rows >= least:
            return None
        return Skipped(reason=f"too little data: {rows} rows, and the API takes {least} or more")

    def charged_tokens(self, trajectories: TrajectoryCollection) -> int:
        """Return an upper bound: the bytes of the training file, with 3 bytes per token."""
        epochs = self._hyperparameters.num_epochs or self.adapter_config.epochs
        return epochs * len(training_file(trajectories)) // _FEWEST_BYTES_PER_TOKEN


@register_trainer_adapter(config_type=OpenAiAdapterConfig)
async def openai(config: OpenAiAdapterConfig, builder: Builder) -> AsyncIterator[OpenAiAdapter]:
    """Yield the adapter of the run's target model. Raises CapabilityError if it is not OpenAI's."""
    llm = trained_model(builder, "openai")
    log = None if builder.run is None else builder.run.path / "openai_jobs.jsonl"
    client = connect(config, llm, needs_key=True)
    try:
        yield OpenAiAdapter(config, client, llm.model_name, log, await run_key(builder))
    finally:
        await client.close()
