"""Training at a language-model server: `_type: lm_server`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from etude.adapters.capabilities import ALL_METHODS, Capabilities
from etude.adapters.hyperparameters import JobHyperparameters
from etude.adapters.lm_client import LanguageModelClient
from etude.adapters.lm_errors import LanguageModelClientError
from etude.adapters.lm_server_config import LmServerAdapterConfig
from etude.adapters.openai_connection import connect, trained_model
from etude.adapters.openai_jobs import OpenAiJobs
from etude.config.finetuning import FinetuneConfig
from etude.config.registry import register_trainer_adapter
from etude.core.job import TrainingJobRef, TrainingJobStatus
from etude.core.skipped import Skipped
from etude.core.trajectory import Method, TrajectoryCollection

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from etude.config.builder import Builder


class LmServerAdapter(OpenAiJobs):
    """Jobs at a language-model server, GRPO among them; its engine can be put away meanwhile."""

    backend: ClassVar[str] = "lm_server"
    adapter_config: LmServerAdapterConfig

    def __init__(
        self,
        adapter_config: LmServerAdapterConfig,
        client: AsyncOpenAI,
        server: LanguageModelClient,
        model: str,
        log: Path | None = None,
    ) -> None:
        """`client` and `server` are of the same server; `model` is its name of the base model."""
        super().__init__(adapter_config, client, model, log)
        self.server = server
        self._away_for: str | None = None
        """The job that the engine was put away for."""

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Wait for the server, check its version and the key, and have its engine run.

        Raises ClientTimeoutError, ServerVersionError or another BackendError.
        """
        await super().initialize(run_config)
        await self.server.wait_for_ready(self.adapter_config.ready_timeout)
        await self.check()
        if self.adapter_config.free_engine:
            # A killed process may have left it away.
            await self.bring_engine_back()

    def capabilities(self) -> Capabilities:
        """All methods; GRPO on token ids, the others on text."""
        return Capabilities(
            methods=ALL_METHODS,
            token_ids_for=frozenset({"grpo"}),
            versions=True,
            from_base=True,
            samples_while_training=not self.adapter_config.free_engine,
        )

    async def is_healthy(self) -> bool:
        """Whether the server answers and takes the key."""
        return await self.server.accepts_connections() and await super().is_healthy()

    def use_hyperparameters(self, hyperparameters: JobHyperparameters) -> None:
        """See `TrainerAdapter.use_hyperparameters`: a server takes all."""
        self._hyperparameters = hyperparameters

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef | Skipped:
        """See `TrainerAdapter.submit`. With `free_engine`, the engine goes away once a job is certain."""
        try:
            return await super().submit(trajectories)
        except BaseException:
            if self._away_for == trajectories.run_id:
                await self._try_to_bring_engine_back()
            raise

    async def make_room(self, name: str) -> None:
        """Put the engine away, where the config says that both do not fit."""
        if self.adapter_config.free_engine:
            self._away_for = name
            await self.put_engine_away()

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """See OpenAiJobs. However a job ends, the engine is back then."""
        status = await super().status(ref)
        if status.status.is_final:
            await self._over(ref)
        return status

    async def wait_until_complete(
        self, ref: TrainingJobRef, poll_interval: float = 10.0
    ) -> TrainingJobStatus:
        """See OpenAiJobs. However the job ends, the engine is back."""
        status = await super().wait_until_complete(ref, poll_interval)
        await self._over(ref)
        return status

    async def cancel(self, ref: TrainingJobRef) -> None:
        """Stop the job if it still runs; the engine is back then."""
        await super().cancel(ref)
        await self._over(ref)

    async def put_engine_away(self) -> None:
        """Free the device for training; requests wait meanwhile, or are told to come again."""
        await self.server.stop_engine(timeout=self.adapter_config.ready_timeout)

    async def bring_engine_back(self) -> None:
        """Have the engine sample again. Raises EngineClientError or ClientTimeoutError when it does not."""
        await self.server.start_engine(timeout=self.adapter_config.ready_timeout)
        self._away_for = None

    def hyperparameters(self, method: Method) -> dict[str, Any]:
        """See OpenAiJobs; with the config's own."""
        given = self._hyperparameters.for_api(method)
        return super().hyperparameters(method) | self.adapter_config.hyperparameters | given

    async def _over(self, ref: TrainingJobRef) -> None:
        if ref.run_id == self._away_for:
            await self.bring_engine_back()

    async def _try_to_bring_engine_back(self) -> None:
        """Where another error is on its way, which says more."""
        with contextlib.suppress(LanguageModelClientError):
            await self.bring_engine_back()


@register_trainer_adapter(config_type=LmServerAdapterConfig)
async def lm_server(config: LmServerAdapterConfig, builder: Builder) -> AsyncIterator[LmServerAdapter]:
    """The adapter of the run's target model. Raises CapabilityError when that is not behind a server."""
    llm = trained_model(builder, "lm_server")
    log = None if builder.run is None else builder.run.path / "lm_server_jobs.jsonl"
    client = connect(config, llm, needs_key=False)
    server = LanguageModelClient(str(client.base_url), client.api_key, timeout=config.request_timeout)
    try:
        yield LmServerAdapter(config, client, server, llm.model_name, log)
    finally:
        await server.close()
        await client.close()
