"""Training at a language-model server: `_type: lm_server`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from etude.algorithms.algorithm import Algorithm, changed_options, find_same_loss, make_algorithm, read_groups
from etude.backends.capabilities import Capabilities, JobHyperparameters
from etude.backends.lm_client import FREE_ENGINE, LanguageModelClient
from etude.backends.openai_api import JobsConfig, connect, run_key, trained_model
from etude.backends.openai_jobs import OpenAiJobs
from etude.config.finetuning import FinetuneConfig
from etude.config.registry import register_trainer_adapter
from etude.core.conversion import TrajectoryCollection
from etude.core.errors import CapabilityError
from etude.core.job import Skipped, TrainingJobRef, TrainingJobStatus
from etude.core.trajectory import Method

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from etude.config.builder import Builder


class LmServerAdapterConfig(JobsConfig, name="lm_server"):
    """Train at a language-model server: `etude serve`, on this machine or another."""

    free_engine: bool = False
    """Stop the server's engine while a job trains, if the device has no room for both. The engine restarts
    afterwards."""


READY_SECONDS = 300.0
"""Seconds to wait for the server, and for its engine to restart."""


class LmServerAdapter(OpenAiJobs):
    """Jobs at a language-model server, for all its algorithms. They can stop its engine while they train."""

    backend: ClassVar[str] = "lm_server"
    adapter_config: LmServerAdapterConfig

    def __init__(
        self,
        adapter_config: LmServerAdapterConfig,
        client: AsyncOpenAI,
        server: LanguageModelClient,
        model: str,
        log: Path | None = None,
        run_key: str | None = None,
    ) -> None:
        """As OpenAiJobs. `client` and `server` must be for the same server."""
        super().__init__(adapter_config, client, model, log, run_key)
        self.server = server
        self.metadata = {FREE_ENGINE: "true"} if adapter_config.free_engine else {}
        self.planned: object = None
        """The config of the run's trajectory builder, which is checked before anything is sampled."""
        self._algorithms: tuple[Method, ...] = ("grpo", "dpo", "supervised")
        """The algorithms that the server knows by name, updated by `initialize`."""

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Wait for the server, and check its version and the key.

        Raises ClientTimeoutError, ServerVersionError or another BackendError.
        """
        await super().initialize(run_config)
        await self.server.wait_for_ready(READY_SECONDS)
        await self.check()
        self._algorithms = tuple(await self.server.algorithms())
        if isinstance(self.planned, Algorithm):
            self._find_server_algorithm(make_algorithm(*self.planned.job_method()))

    def capabilities(self) -> Capabilities:
        # All algorithms that the server knows or has a loss for.
        return Capabilities(
            token_ids_for=frozenset({"samples"}),
            measures=False,
            versions=True,
            from_base=True,
            samples_while_training=not self.adapter_config.free_engine,
        )

    async def is_healthy(self) -> bool:
        self.unhealthy_because = await self.server.problem(tries_again=True)
        return self.unhealthy_because is None and await super().is_healthy()

    def use_hyperparameters(self, hyperparameters: JobHyperparameters) -> None:
        """Set hyperparameters of the next jobs. A server accepts all of them."""
        self._hyperparameters = hyperparameters

    async def wait_until_complete(
        self, ref: TrainingJobRef, poll_interval: float = 10.0
    ) -> TrainingJobStatus:
        """Poll until the job ends. Then restart an engine that was stopped for it."""
        status = await super().wait_until_complete(ref, poll_interval)
        if self.adapter_config.free_engine:
            await self.bring_engine_back()
        return status

    async def put_engine_away(self) -> None:
        """Stop the engine until `bring_engine_back`. Requests wait, or get an answer to retry later."""
        await self.server.stop_engine(timeout=READY_SECONDS)

    async def bring_engine_back(self) -> None:
        """Restart the engine. Raises LanguageModelClientError if it does not start."""
        await self.server.start_engine(timeout=READY_SECONDS)

    def prepare(self, trajectories: TrajectoryCollection) -> TrajectoryCollection:
        """Return the collection for the server's algorithm of the same name, or of the same loss.

        Samples have their advantages if the server cannot compute them: for the latter, and with step
        rewards, since rows do not tell which agent answered. Raises CapabilityError if there is none.
        """
        algorithm = make_algorithm(trajectories.method, trajectories.options)
        same = self._find_server_algorithm(algorithm)
        update: dict[str, Any] = {"method": same.type_name, "options": changed_options(algorithm, same)}
        if algorithm.kind == "samples":
            groups = [[unit.samples[0] for unit in group] for group in read_groups(trajectories, algorithm)]
            if same is not type(algorithm) or any(sample.returns for group in groups for sample in group):
                update["groups"] = algorithm.assigned(groups)
        return trajectories.model_copy(update=update)

    def reason_to_skip(self, trajectories: TrajectoryCollection, rows: int) -> Skipped | None:
        """As `OpenAiJobs`. A KL loss changes nothing by itself if its reference is the job's own start."""
        algorithm = make_algorithm(trajectories.method, trajectories.options)
        if algorithm.kind != "samples":  # Other kinds may have texts, which the server tokenises.
            return None
        pulls_to_start = self.adapter_config.hyperparameters.get("reference") != "base"
        return algorithm.reason_to_skip(read_groups(trajectories, algorithm), at_base=pulls_to_start)

    def _find_server_algorithm(self, algorithm: Algorithm) -> type[Algorithm]:
        """Return the server's algorithm with the same loss. Raises CapabilityError if there is none."""
        same = find_same_loss(algorithm, self._algorithms)
        if same is None:
            name = algorithm.type_name
            raise CapabilityError(
                f"the server does not know the algorithm '{name}', and has no such loss. Start it with "
                f"`etude serve --algorithms {name}`, where it can be imported, or use the adapter 'local'"
            )
        return same


@register_trainer_adapter(config_type=LmServerAdapterConfig)
async def lm_server(config: LmServerAdapterConfig, builder: Builder) -> AsyncIterator[LmServerAdapter]:
    """Yield the adapter of the run's target model. Raises CapabilityError if it is not behind a server."""
    llm = trained_model(builder, "lm_server")
    log = None if builder.run is None else builder.run.path / "lm_server_jobs.jsonl"
    client = connect(config, llm, needs_key=False)
    server = LanguageModelClient(str(client.base_url), client.api_key)
    try:
        adapter = LmServerAdapter(config, client, server, llm.model_name, log, await run_key(builder))
        name = builder.config.finetuning.trajectory_builder
        adapter.planned = builder.config.trajectory_builders.get(name or "")
        yield adapter
    finally:
        await server.close()
        await client.close()
