"""The group of agents that are reached through the OpenAI SDK, and trained through any adapter."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from etude.backends.lm_client import LanguageModelClient
from etude.backends.lm_server import LmServerAdapter
from etude.backends.openai_api import TrainingJobNotFoundClientError
from etude.backends.openai_jobs import OpenAiJobs
from etude.core.errors import CapabilityError, RequestError, TrainingError
from etude.core.job import ModelVersion, Skipped, TrainingJobRef, TrainingJobStatus
from etude.core.keys import content_hash
from etude.core.trajectory import Method, Trajectory, TrajectoryCollection
from etude.groups.agents import GroupAgent
from etude.groups.data import Rollouts, Steps, collection, dpo_data, grpo_data, supervised_data
from etude.groups.line import FOR_GROUPS, LineRules, ModelLine, require_completed, version_of
from etude.groups.lineage import LineageEntry
from etude.groups.shared import (
    NOTHING,
    STATUSES,
    JobResult,
    JobStatus,
    SharedModelGroup,
)
from etude.groups.state import HostedState, SharedModelGroupState, by_own_names, read_state
from etude.jobs.content import data_hash
from etude.protocols.protocol import Protocol

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.fine_tuning import FineTuningJob

_LOG = logging.getLogger("etude.groups")
_POLL = 0.5


async def _until(is_ready: Callable[[], Awaitable[bool]], seconds: float, who: str, service: str) -> None:
    """Poll until it is ready, and log what `who` waits for if that is not at once.

    Raises TimeoutError, naming both, when it is not ready after `seconds`.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            if await is_ready():
                return
            _LOG.warning("%s waits up to %g s for %s, which is not healthy", who, seconds, service)
            # A server in another process sends no event when it has started.
            while not await is_ready():  # noqa: ASYNC110
                await asyncio.sleep(min(_POLL, seconds))
            _LOG.warning("%s goes on: %s is healthy", who, service)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(f"{who} is not ready after {seconds:g} s: {service} is not healthy") from error


OpenAiSharedModelGroupState = SharedModelGroupState

_RETRY = "-retry-"

ClientType = Literal["openai", "lm_server", "adapter", "none"]


class OpenAiSharedModelGroup(SharedModelGroup):
    """A group whose jobs go to the OpenAI API, to a language-model server, or to any other adapter.

    Every job and every switch is journalled under the group's name: `wait_for_ready` in another process
    goes on from there.
    """

    def __init__(
        self,
        group_name: str,
        agent_wholes: Iterable[GroupAgent],
        line: ModelLine,
        protocol: Protocol | None = None,
    ) -> None:
        """`line` is the model with its engine and adapter; its rules become those of the agents.

        Raises CapabilityError for hyperparameters of the agents' settings that the adapter cannot take.
        """
        super().__init__(group_name, agent_wholes, protocol)
        self.line = line
        settings = self.settings
        line.rules = LineRules(
            frozen=settings.freeze_agent,
            dry_run=settings.dry_run,
            min_rows=settings.min_rows,
            from_scratch=settings.fine_tune_from_scratch,
        )
        line.advice = FOR_GROUPS
        if not settings.freeze_agent:
            line.use_hyperparameters(settings.hyperparameters)
        self._state = SharedModelGroupState()
        self._is_given = False
        """Whether the state is one that `set_state` was given, and not the journal's."""
        self._is_taken_up = False
        """Whether model and backend are at the state's version."""
        self._last: JobResult | None = None
        self._openai: AsyncOpenAI | None = None

    @property
    def training_client_type(self) -> ClientType:
        """The kind of backend that jobs go to: OpenAI, a language-model server, another adapter, or none."""
        adapter = self.line.adapter
        if isinstance(adapter, LmServerAdapter):
            return "lm_server"
        if isinstance(adapter, OpenAiJobs):
            return "openai"
        return "adapter" if adapter.capabilities().methods else "none"

    @property
    def is_trainable(self) -> bool:
        """Whether the model can be trained: not frozen, and somewhere to train it."""
        return super().is_trainable and self.training_client_type != "none"

    @property
    def model_name(self) -> str:
        """The current model: the base model, or a fine-tuned one."""
        return self._state.fine_tuned_model_name or self.settings.model_name

    @property
    def language_model_client(self) -> LanguageModelClient:
        """The client that controls the server's engine. Raises CapabilityError where there is no server."""
        return self._lm_server.server

    @property
    def _lm_server(self) -> LmServerAdapter:
        if not isinstance(self.line.adapter, LmServerAdapter):
            raise CapabilityError(f"group '{self.group_name}' does not train at a language-model server")
        return self.line.adapter

    @property
    def openai_client(self) -> AsyncOpenAI:
        """The client of the OpenAI API: the adapter's, or one for the environment's key."""
        if isinstance(self.line.adapter, OpenAiJobs):
            return self.line.adapter.client
        if self._openai is None:
            from openai import AsyncOpenAI

            self._openai = AsyncOpenAI()
        return self._openai

    async def create_supervised_fine_tune_job(
        self,
        rollouts_per_agent: Rollouts,
        guess_replaced_rollouts: Rollouts = NOTHING,
        job_name: str | None = None,
    ) -> JobResult:
        """Make a job that imitates the rollouts of this group's agents."""
        self._require_own(rollouts_per_agent)
        self._require_own(guess_replaced_rollouts)
        for name in guess_replaced_rollouts:
            if not self.agent_wholes[name].may_decide:
                raise RequestError(f"agent '{name}' is no verifier: it has no guess that could be replaced")
        data = supervised_data(rollouts_per_agent, guess_replaced_rollouts, self.line.model)
        return await self._make_fine_tune_api_call(data, "supervised", job_name)

    async def create_dpo_fine_tune_job(
        self,
        positive_examples_per_agent: Steps,
        negative_examples_per_agent: Steps,
        job_name: str | None = None,
    ) -> JobResult:
        """Make a DPO job of pairs of steps."""
        self._require_own(positive_examples_per_agent)
        data = dpo_data(positive_examples_per_agent, negative_examples_per_agent, self.line.model)
        return await self._make_fine_tune_api_call(data, "dpo", job_name)

    async def create_grpo_fine_tune_job(
        self,
        rollouts_per_agent: Rollouts,
        rewards: Mapping[str, float] | None = None,
        job_name: str | None = None,
    ) -> JobResult:
        """Make a GRPO job of rollouts."""
        self._require_own(rollouts_per_agent)
        data = grpo_data(rollouts_per_agent, rewards, self.line.model)
        return await self._make_fine_tune_api_call(data, "grpo", job_name)

    async def get_fine_tune_job_status(self) -> JobStatus:
        """The status of the last job."""
        await self._take_up()
        ref = self._state.fine_tune_job
        return "not_found" if ref is None else STATUSES[(await self.line.status(ref)).status]

    async def get_fine_tune_job_error_repr(self) -> str:
        """The reason why the last job failed, or why there is none."""
        await self._take_up()
        ref = self._state.fine_tune_job
        if isinstance(self._last, Skipped):
            return self._last.reason
        if ref is None:
            return str(TrainingJobNotFoundClientError(None))
        return (await self.line.status(ref)).message or ""

    async def wait_for_fine_tune_job(self, timeout: float = 86400.0, poll_interval: float = 10.0) -> None:  # noqa: ASYNC109
        """Wait until the last job is completed; at once when there is none to wait for.

        Raises TrainingError when it ends otherwise, or not within `timeout` seconds.
        """
        await self._take_up()
        if self._state.fine_tune_job is not None:
            await self.line.wait(self._state.fine_tune_job, timeout, poll_interval)

    async def switch_to_next_model(self) -> ModelVersion | None:
        """Sample from the weights that the last job made, and journal it."""
        await self._take_up()
        ref, now = self._state.fine_tune_job, self.line.version
        if isinstance(self._last, Skipped):
            return now
        if ref is None:
            raise TrainingJobNotFoundClientError(None)
        entry = None if now is None else self.line.log.entry(now.number)
        if entry is not None and entry.job.run_id == ref.run_id:
            return now
        status = await self.line.status(ref)
        require_completed(ref, status, self.line.advice)
        if not self._is_hosted_here(status):
            await self.line.adopt(ref, status)
        await self._keep(self._state.model_copy(update={"version": self.line.version}))
        return self.line.version

    def lineage(self) -> list[LineageEntry]:
        """The versions since the base, oldest first, with the job, the data and the metrics of each."""
        return self.line.log.entries()

    def get_state_dict(self) -> dict[str, Any]:
        """The state as JSON."""
        return self._state.model_dump(mode="json")

    def set_state(self, checkpoint: SharedModelGroupState | dict[str, Any]) -> None:
        """Go on from a state; those of Neural Interactive Proofs are understood too.

        The next call that needs the model takes it up, and journals it: `wait_for_ready`, `eval`, a job, or
        `switch_to_next_model`.
        """
        state = read_state(checkpoint)
        if isinstance(state, HostedState):
            state = by_own_names(state, self.settings.model_name, self.line)
        version = state.version
        known = None if version is None else self.line.log.entry(version.number)
        if version is not None and known is not None and known.version.digest != version.digest:
            raise RequestError(
                f"version {version.number} of group '{self.group_name}' is {known.version.location}, and in "
                f"this state it is {version.location}: is it the state of another group?"
            )
        self._state, self._is_given, self._is_taken_up = state, True, False
        self._last = state.fine_tune_job

    async def train(self) -> None:
        """Put the engine of a language-model server away, where its adapter has `free_engine`."""
        adapter = self.line.adapter
        trains = self.is_trainable and not self.settings.dry_run
        if trains and isinstance(adapter, LmServerAdapter) and adapter.adapter_config.free_engine:
            await adapter.put_engine_away()

    async def eval(self) -> None:
        """Have the engine sample from the current model."""
        if self.training_client_type == "lm_server":
            await self._lm_server.bring_engine_back()
        await self._take_up()
        if self._state.version is not None:
            await self.line.sample_from(self._state.version)

    async def wait_for_ready(self, timeout: float = 300.0) -> None:  # noqa: ASYNC109  # the reference's name
        """Wait until the backend answers, then take up the state: the one given, or the journal's.

        Logs what it waits for. At a language-model server its version is checked too. Raises
        TimeoutError after `timeout` seconds, ServerVersionError.
        """
        if self.training_client_type == "lm_server":
            await self.language_model_client.wait_for_ready(timeout)
        else:
            backend = f"the training backend '{self.line.adapter.adapter_config.type_name}'"
            await _until(self.line.adapter.is_healthy, timeout, f"group '{self.group_name}'", backend)
        await self._take_up()

    async def _take_up(self) -> None:
        """Go on from the state, once: the one given, or the journal's."""
        if self._is_taken_up:
            return
        kept = self.line.log.state()
        if kept is not None and not self._is_given:
            self._state = SharedModelGroupState.model_validate(kept)
            self._last = self._state.fine_tune_job
        begin = self.line.log.base() if self._is_given else None
        await self.line.take_up(self._state.version or begin)
        self._state = self._state.model_copy(update={"version": self.line.version})
        if self._is_given:
            await self._note_where_from()
            # A job that was made elsewhere has no number, and gets one when it is done.
            await self.line.adapter.count_from(self.line.log.newest())
            await self._keep(self._state)
        self._is_given, self._is_taken_up = False, True

    async def _note_where_from(self) -> None:
        """Put a version that was made elsewhere into the lineage, so that its number is taken."""
        version = self._state.version
        if version is None or not version.number or self.line.log.entry(version.number) is not None:
            return
        made_by = TrainingJobRef(run_id=version.location, backend=self.line.adapter.adapter_config.type_name)
        await self.line.log.add(LineageEntry(version=version, job=made_by))

    def _is_hosted_here(self, status: TrainingJobStatus) -> bool:
        """Whether the model that a job made is sampled from already: after a state that says so."""
        version = version_of(status, False, TrainingJobRef(run_id=status.run_id, backend=status.backend))
        current = self.line.version
        if version is None or current is None or not isinstance(self.line.adapter, OpenAiJobs):
            return False
        return version.location == current.location

    def _require_own(self, per_agent: Mapping[str, Any]) -> None:
        for name in per_agent:
            if name not in self.agent_wholes:
                known = ", ".join(self.agent_wholes)
                raise RequestError(f"group '{self.group_name}' has no agent '{name}'; agents: {known}")

    async def _make_fine_tune_api_call(
        self, fine_tune_dataset: list[list[Trajectory]], method: Method, job_name: str | None = None
    ) -> JobResult:
        """Submit the data set as a job, or say why there is none."""
        data = collection(fine_tune_dataset, method, job_name or "")
        result: JobResult | None = self.line.reason_to_skip(len(data))
        if result is None:
            await self._take_up()
            data = data.model_copy(update={"run_id": await self._attempt(job_name or self._name_of(data))})
            match self.training_client_type:
                case "openai":
                    result = await self._make_fine_tune_api_call_openai(data)
                case "lm_server":
                    result = await self._make_fine_tune_api_call_lm_server(data)
                case _:
                    result = await self.line.submit(data)
        self._last = result
        if isinstance(result, TrainingJobRef):
            await self._keep(self._state.model_copy(update={"fine_tune_job": result}))
        return result

    def _name_of(self, data: TrajectoryCollection) -> str:
        """The name of a job that was given none: another one for other content."""
        start = None if self.settings.fine_tune_from_scratch else self.line.version
        content = content_hash([data_hash(data), self.settings.hyperparameters.given()])
        return f"{self.group_name}-from-v{0 if start is None else start.number}-{content[:12]}"

    async def _attempt(self, job_name: str) -> str:
        """The name of a job's next attempt: the same one until it has failed."""
        ref = self._state.fine_tune_job
        last = "" if ref is None else ref.run_id
        if last != job_name and not last.startswith(f"{job_name}{_RETRY}"):
            return job_name
        if not await self.fine_tune_job_failed():
            return last
        attempt = last.removeprefix(job_name).removeprefix(_RETRY) or "0"
        return f"{job_name}{_RETRY}{int(attempt) + 1}"

    async def _make_fine_tune_api_call_openai(self, fine_tune_dataset: TrajectoryCollection) -> JobResult:
        """Make the job at OpenAI. Raises CapabilityError for a method that the API does not have."""
        return await self.line.submit(fine_tune_dataset)

    async def _make_fine_tune_api_call_lm_server(self, fine_tune_dataset: TrajectoryCollection) -> JobResult:
        """Make the job at the language-model server."""
        return await self.line.submit(fine_tune_dataset)

    async def _get_openai_fine_tune_job(self) -> FineTuningJob:
        """The job as the OpenAI API reports it. Raises TrainingJobNotFoundClientError."""
        return await self._fine_tune_job("openai")

    async def _get_lm_server_fine_tune_job(self) -> FineTuningJob:
        """The job as the language-model server reports it. Raises TrainingJobNotFoundClientError."""
        return await self._fine_tune_job("lm_server")

    async def _fine_tune_job(self, client: ClientType) -> FineTuningJob:
        ref, adapter = self._state.fine_tune_job, self.line.adapter
        if ref is None:
            raise TrainingJobNotFoundClientError(None)
        if not isinstance(adapter, OpenAiJobs) or self.training_client_type != client:
            raise TrainingError(f"group '{self.group_name}' does not train through '{client}'")
        return await adapter.job(ref)

    async def _keep(self, state: SharedModelGroupState) -> None:
        """Journal the state; only then it is the group's."""
        await self.line.log.put_state(state.model_dump(mode="json"))
        self._state = state
