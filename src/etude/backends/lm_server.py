"""The adapter `lm_server`, and a client for what a language-model server has beyond OpenAI's API."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import httpx
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ValidationError

from etude.algorithms.algorithm import Algorithm, changed_options, find_algorithm, find_same_loss, read_groups
from etude.backends.openai_api import JobsConfig, connect, run_key
from etude.backends.openai_jobs import OpenAiJobs
from etude.backends.trainer_adapter import Capabilities, JobHyperparameters, trained_model
from etude.config.finetuning import FinetuneConfig
from etude.config.registry import register_trainer_adapter
from etude.core.data_model import list_faults
from etude.core.errors import BackendError, CapabilityError
from etude.core.job import Skipped, TrainingJobRef, TrainingJobStatus
from etude.core.sample import TrajectoryCollection
from etude.core.secrets import keep_secret
from etude.core.trajectory import Method
from etude.engines.openai_compatible import OpenAiLlmConfig
from etude.wire.retries import USUAL, Retryable, RetryPolicy, RetryReason, describe, to_failure, with_retries

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from etude.config.builder import Builder

FREE_ENGINE = "etude_free_engine"
"""Metadata key of a job: with "true", the server stops its engine while the job trains."""
_LOG = logging.getLogger("etude.backends.lm_server")
_POLL = 0.5
_READY_SECONDS = 300.0
"""Seconds to wait for the server, or for its engine."""
_ONCE = RetryPolicy(retries=0)
Model = TypeVar("Model", bound=BaseModel)


class LanguageModelClientError(BackendError):
    """The server gave no usable answer."""

    def __init__(self, message: str, again: RetryReason | None = None) -> None:
        """`again` is the reason for a retry. None if a retry cannot help."""
        super().__init__(message, temporary=isinstance(self, TimeoutError))
        self.again = again


class BadResponseError(LanguageModelClientError):
    """The server cannot be reached, refused the request, or sent an unexpected answer."""


class ClientTimeoutError(LanguageModelClientError, TimeoutError):
    """The server did not answer, or was not ready, in time."""


class ServerVersionError(LanguageModelClientError):
    """The server has another major version."""


class _Version(BaseModel):
    version: str


class _Algorithms(BaseModel):
    data: list[str]


class EngineStatus(BaseModel, frozen=True):
    """`GET /engine/status`. Newer servers may add fields."""

    status: Literal["running", "stopping", "stopped"] | str
    engine: str | None = None
    """The kind of engine."""
    models: tuple[str, ...] = ()
    """The models in memory."""
    away_for_jobs: bool = False
    """Whether it is stopped while jobs train. It restarts afterwards."""


class LanguageModelClient:
    """A client that controls a language-model server's engine. Jobs and completions use the OpenAI SDK."""

    def __init__(
        self,
        base_url: str,
        api_key: str = "",
        *,
        timeout: float = 60.0,
        transport: httpx.AsyncBaseTransport | None = None,
        policy: RetryPolicy = USUAL,
    ) -> None:
        """`base_url` may end in `/v1`. `timeout` is in seconds per request. Nothing is sent yet.

        `policy` controls the retries of requests.
        """
        from etude.engines.http_client import UNCOMPRESSED, limit_answer

        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        keep_secret(api_key)
        headers = UNCOMPRESSED | ({"authorization": f"Bearer {api_key}"} if api_key else {})
        self._timeout, self._policy = timeout, policy
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            headers=headers,
            transport=transport,
            event_hooks={"response": [limit_answer]},
        )

    async def get_server_version(self) -> str:
        """Return the server's version of Etude."""
        return (await self._ask("/version", _Version)).version

    async def algorithms(self) -> list[str]:
        """Return the algorithms that jobs can name: shipped ones and those the server was started with."""
        return (await self._ask("/v1/fine_tuning/algorithms", _Algorithms)).data

    async def get_engine_status(self) -> EngineStatus:
        """Return whether the engine runs, and with which models."""
        return await self._ask("/engine/status", EngineStatus)

    async def start_engine(self, *, timeout: float = _READY_SECONDS) -> EngineStatus:  # noqa: ASYNC109
        """Start the engine, and wait until it runs. Time in which jobs keep the engine stopped does not
        count.

        Raises BadResponseError with the reason if it cannot start, ClientTimeoutError if it does not run
        within `timeout` seconds.
        """
        await with_retries(lambda: self._attempt("POST", "/engine/start", timeout), policy=self._policy)
        deadline = time.monotonic() + timeout
        while True:
            engine = await self.get_engine_status()
            if engine.status == "running":
                return engine
            if engine.away_for_jobs:
                deadline = time.monotonic() + timeout
            elif time.monotonic() >= deadline:
                raise ClientTimeoutError(
                    f"the engine at {self.base_url} is {engine.status} after {timeout:g} s"
                )
            await asyncio.sleep(min(_POLL, timeout))

    async def stop_engine(self, *, timeout: float = _READY_SECONDS) -> None:  # noqa: ASYNC109
        """Stop the engine, so that training has the device. A stopped engine is not an error."""
        await with_retries(lambda: self._attempt("POST", "/engine/stop", timeout), policy=self._policy)

    async def wait_for_ready(self, timeout: float = _READY_SECONDS) -> None:  # noqa: ASYNC109  # seed's name
        """Wait until the server answers, and check its version. The log says why the client waits.

        Raises ClientTimeoutError after `timeout` seconds, ServerVersionError.
        """
        deadline, last_problem = time.monotonic() + timeout, None
        while (problem := await self.problem(max(_POLL, deadline - time.monotonic()))) is not None:
            if problem != last_problem:
                last_problem = problem
                _LOG.warning("waiting for a language-model server at %s: %s", self.base_url, problem)
            left = deadline - time.monotonic()
            if left <= 0:
                raise ClientTimeoutError(
                    f"no language-model server answers at {self.base_url} after {timeout:g} s ({problem}); "
                    "start one: etude serve"
                )
            await asyncio.sleep(min(_POLL, left))
        await self.validate_server_version()

    async def problem(self, seconds: float | None = None, *, tries_again: bool = False) -> str | None:
        """Return why the server is unavailable, or None. `tries_again` retries as other requests do."""
        policy = self._policy if tries_again else _ONCE
        try:
            await with_retries(lambda: self._attempt("GET", "/health", seconds), policy=policy)
        except LanguageModelClientError as error:
            return str(error)
        return None

    async def validate_server_version(self) -> None:
        """Raise ServerVersionError for another major version. Warn about another minor version."""
        theirs, ours = await self.get_server_version(), version("etude")
        try:
            server, client = Version(theirs), Version(ours)
        except InvalidVersion as error:
            raise BadResponseError(f"{self.base_url} says that its version is {theirs!r:.40}") from error
        versions = f"the server at {self.base_url} is etude {theirs}, and this is etude {ours}"
        if server.major != client.major:
            raise ServerVersionError(f"{versions}: another major version. Install the same one")
        if server.minor != client.minor:
            _LOG.warning("%s: features that only one of them has will not work", versions)

    async def close(self) -> None:
        """Close the connections. Calling it twice is fine."""
        await self._http.aclose()

    async def _ask(self, path: str, model: type[Model]) -> Model:
        async def ask() -> Model:
            response = await self._attempt("GET", path, None)
            try:
                return model.model_validate_json(response.content)
            except ValidationError as error:
                raise BadResponseError(
                    f"GET {self.base_url}{path} answered something else ({list_faults(error)}); is it an "
                    "etude server?",
                    RetryReason("malformed"),
                ) from error

        return await with_retries(ask, policy=self._policy)

    async def _attempt(self, method: str, path: str, seconds: float | None) -> httpx.Response:
        where = f"{method} {self.base_url}{path}"
        most = self._timeout if seconds is None else seconds
        try:
            async with asyncio.timeout(most):  # In total: httpx limits only single pieces.
                response = await self._http.request(method, path, timeout=most)
        except (httpx.TimeoutException, TimeoutError) as error:
            later = RetryReason("timeout") if method == "GET" else None
            raise ClientTimeoutError(f"{where}: no answer in time", later) from error
        except httpx.RequestError as error:
            raise BadResponseError(f"{where}: {describe(error)}", RetryReason("connection")) from error
        if response.is_success:
            return response
        failure = to_failure(response.status_code, response.headers, response.content)
        later = failure.again if isinstance(failure, Retryable) else None
        raise BadResponseError(f"{where} answered {failure}", later)


class LmServerAdapterConfig(JobsConfig, name="lm_server"):
    """Train at a language-model server: `etude serve`, on this machine or another."""

    free_engine: bool = False
    """Stop the server's engine while a job trains, if the device has no room for both, and restart it."""


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
        run_key: str | None = None,
    ) -> None:
        """As OpenAiJobs. `client` and `server` must be for the same server."""
        super().__init__(adapter_config, client, model, run_key)
        self.server = server
        self.metadata = {FREE_ENGINE: "true"} if adapter_config.free_engine else {}
        self._algorithms: tuple[Method, ...] = ("grpo", "dpo", "supervised")
        """The algorithms that the server knows by name, updated by `initialize`."""

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Wait for the server, and check its version and the key.

        Raises ClientTimeoutError, ServerVersionError or another BackendError.
        """
        await super().initialize(run_config)
        await self.server.wait_for_ready()
        await self.check()
        self._algorithms = tuple(await self.server.algorithms())
        if self.algorithm is not None:
            self._find_server_algorithm(self.algorithm)

    def capabilities(self) -> Capabilities:
        # All algorithms that the server knows or has a loss for.
        return Capabilities(
            token_ids_for=frozenset({"samples"}),
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
            await self.server.start_engine()
        return status

    def prepare(self, trajectories: TrajectoryCollection) -> tuple[TrajectoryCollection, dict[str, Any]]:
        """Return the collection for the server's algorithm with the same loss, and the changed options.

        Samples have their advantages if the server cannot compute them: for the latter, and with step
        rewards, since rows do not tell which agent answered. Raises CapabilityError if there is none.
        """
        algorithm = find_algorithm(trajectories.method, self.algorithm)
        same = self._find_server_algorithm(algorithm)
        update: dict[str, Any] = {"method": same.type_name}
        if algorithm.kind == "samples":
            groups = [
                [unit.samples[0] for unit in group] for group in read_groups(trajectories.groups, algorithm)
            ]
            if same is not type(algorithm) or any(sample.returns for group in groups for sample in group):
                update["groups"] = algorithm.assign_advantages(groups)
        return trajectories.model_copy(update=update), changed_options(algorithm, same)

    def reason_to_skip(self, trajectories: TrajectoryCollection, rows: int) -> Skipped | None:
        """As `OpenAiJobs`. A KL loss changes nothing by itself if its reference is the job's own start."""
        algorithm = find_algorithm(trajectories.method, self.algorithm)
        if algorithm.kind != "samples":  # Other kinds may have texts, which the server tokenises.
            return None
        pulls_to_start = self.adapter_config.hyperparameters.get("reference") != "base"
        return algorithm.reason_to_skip(read_groups(trajectories.groups, algorithm), at_base=pulls_to_start)

    def _find_server_algorithm(self, algorithm: Algorithm) -> type[Algorithm]:
        """Return the server's algorithm with the same loss. Raises CapabilityError if there is none."""
        name = algorithm.type_name
        if (same := find_same_loss(algorithm, self._algorithms)) is None:
            raise CapabilityError(
                f"the server does not know the algorithm '{name}', and has no such loss. Start it with "
                f"`etude serve --algorithms {name}`, where it can be imported, or use the adapter 'local'"
            )
        return same


@register_trainer_adapter(config_type=LmServerAdapterConfig)
async def lm_server(config: LmServerAdapterConfig, builder: Builder) -> AsyncIterator[LmServerAdapter]:
    """Yield the adapter of the run's target model. Raises CapabilityError if it is not behind a server."""
    llm = trained_model(builder, "lm_server", OpenAiLlmConfig)
    client = connect(config, llm, needs_key=False)
    server = LanguageModelClient(str(client.base_url), client.api_key)
    try:
        yield LmServerAdapter(config, client, server, llm.model_name, await run_key(builder))
    finally:
        await server.close()
        await client.close()
