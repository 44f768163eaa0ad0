"""Training at OpenAI: `_type: openai`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from pydantic import Field

from etude.backends.capabilities import Capabilities
from etude.backends.openai_api import JobsConfig, connect, run_key, trained_model
from etude.backends.openai_jobs import OpenAiJobs
from etude.backends.openai_rows import rows_of, texts_of
from etude.config.finetuning import FinetuneConfig
from etude.config.registry import register_trainer_adapter
from etude.core.trajectory import TrajectoryCollection

if TYPE_CHECKING:
    from etude.config.builder import Builder


class OpenAiAdapterConfig(JobsConfig, name="openai"):
    """Train at OpenAI, through its fine-tuning API."""

    min_rows: int = Field(default=10, ge=1)
    """The API refuses training files with fewer rows."""


AUTO_EPOCHS = 3
"""The epochs that `auto` is taken for: OpenAI's choice for data sets of a few hundred rows."""

_FEWEST_BYTES_PER_TOKEN = 3
"""For what a job may take at most."""
_FRAME_TOKENS = 4
"""Tokens around each message."""


class OpenAiAdapter(OpenAiJobs):
    """Jobs at OpenAI, of supervised fine-tuning and DPO: it takes no rewards that somebody else gave."""

    adapter_config: OpenAiAdapterConfig

    async def initialize(self, run_config: FinetuneConfig) -> None:
        await super().initialize(run_config)
        await self.check()

    def capabilities(self) -> Capabilities:
        methods = frozenset({"supervised", "dpo"})
        return Capabilities(methods=methods, options=frozenset({"beta"}), versions=True, from_base=True)

    def charged_tokens(self, trajectories: TrajectoryCollection) -> int | None:
        """Three bytes of text are at most a token."""
        texts = [text.encode() for row in rows_of(trajectories) for text in texts_of(row)]
        tokens = sum(len(text) / _FEWEST_BYTES_PER_TOKEN + _FRAME_TOKENS for text in texts)
        epochs = self.adapter_config.n_epochs
        return round((AUTO_EPOCHS if epochs == "auto" else epochs) * tokens)


@register_trainer_adapter(config_type=OpenAiAdapterConfig)
async def openai(config: OpenAiAdapterConfig, builder: Builder) -> AsyncIterator[OpenAiAdapter]:
    """The adapter of the run's target model. Raises CapabilityError when that is not OpenAI's."""
    llm = trained_model(builder, "openai")
    log = None if builder.run is None else builder.run.path / "openai_jobs.jsonl"
    client = connect(config, llm, needs_key=True)
    try:
        yield OpenAiAdapter(config, client, llm.model_name, log, await run_key(builder))
    finally:
        await client.close()
