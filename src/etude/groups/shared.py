"""A shared model group: the agents that share one trainable model, its jobs and its versions."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pydantic import BaseModel, ValidationError

from etude.backends.lm_server import LanguageModelClient, LmServerAdapter
from etude.backends.openai_api import TrainingJobNotFoundClientError
from etude.backends.openai_jobs import OpenAiJobs
from etude.core.errors import CapabilityError, RequestError, TrainingError
from etude.core.job import ModelVersion, Skipped, TrainingJobRef, TrainingStatusEnum
from etude.core.keys import content_hash
from etude.core.records import GroupChanged, LineageEntry
from etude.core.sample import TrainingUnit, TrajectoryCollection
from etude.core.trajectory import Method
from etude.groups.agents import (
    GroupAgent,
    ModelSettings,
    Rollouts,
    Steps,
    dpo_data,
    grpo_data,
    supervised_data,
)
from etude.groups.model_jobs import ModelJobs, require_completed
from etude.protocols.protocol import Protocol

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.fine_tuning import FineTuningJob

JobStatus: TypeAlias = Literal["pending", "running", "succeeded", "failed", "cancelled", "not_found"]
"""The status of a fine-tune job."""

_STATUSES: dict[TrainingStatusEnum, JobStatus] = {
    TrainingStatusEnum.PENDING: "pending",
    TrainingStatusEnum.RUNNING: "running",
    TrainingStatusEnum.COMPLETED: "succeeded",
    TrainingStatusEnum.FAILED: "failed",
    TrainingStatusEnum.CANCELED: "cancelled",
    TrainingStatusEnum.NOT_FOUND: "not_found",
}

JobResult: TypeAlias = TrainingJobRef | Skipped
"""The job that was made, or the reason for none: `Frozen`, `DryRun`, or `Skipped` for too little data."""

ClientType: TypeAlias = Literal["openai", "lm_server", "adapter", "none"]

_POLL = 0.5
_RETRY = "-retry-"


class SharedModelGroupState(BaseModel, frozen=True, extra="forbid"):
    """The state of a group, from which another process can continue."""

    fine_tune_job: TrainingJobRef | None = None
    """The last job; None before the first."""
    version: ModelVersion | None = None
    """The version that the engine samples from; None for the base model, until a version is known."""

    @property
    def fine_tune_job_id(self) -> str | None:
        """The name of the last job."""
        return None if self.fine_tune_job is None else self.fine_tune_job.run_id

    @property
    def fine_tuned_model_name(self) -> str | None:
        """The name or folder of the fine-tuned weights; None for the base model."""
        return self.version.location if self.version is not None and self.version.number else None


class SharedModelGroup:
    """Agents that share one model, which is fine-tuned on the data of all of them.

    Jobs go to OpenAI's API, to a language-model server, or to any other adapter. Every job and every switch
    is journalled under the group's name. A group with the same name in another process continues from the
    journal.
    """

    def __init__(
        self,
        group_name: str,
        agent_wholes: Iterable[GroupAgent],
        jobs: ModelJobs,
        protocol: Protocol | None = None,
    ) -> None:
        """Create the group. `jobs` is the model with its engine and adapter.

        The agents' settings replace the ones in `jobs`. `protocol` is the protocol that they play, if any.
        Raises RequestError for agents of another group, not in the protocol, or with different settings.
        Raises CapabilityError for hyperparameters that the adapter does not support.
        """
        self.group_name = group_name
        self.agent_wholes: Mapping[str, GroupAgent] = _by_name(group_name, agent_wholes)
        self.settings: ModelSettings = next(iter(self.agent_wholes.values())).settings
        self.protocol = protocol
        for name in self.agent_wholes:
            if protocol is not None and name not in protocol.agents:
                known = ", ".join(protocol.agents)
                raise RequestError(f"protocol '{protocol.name}' has no agent '{name}'; agents: {known}")
        self.jobs = jobs
        jobs.settings = self.settings
        if not self.settings.freeze_agent:
            jobs.use_hyperparameters(self.settings.hyperparameters)
        self._state = SharedModelGroupState.model_validate(jobs.log.state.group)
        self._is_given = False
        """Whether the state was passed to `set_state` and does not come from the journal."""
        self._is_taken_up = False
        """Whether the engine and the backend are at the state's version."""
        self._last: JobResult | None = self._state.fine_tune_job

    @property
    def is_trainable(self) -> bool:
        """Whether the model can be trained: it is not frozen, and the adapter supports a method."""
        return not self.settings.freeze_agent and bool(self.jobs.adapter.capabilities().methods)

    @property
    def model_name(self) -> str:
        """The name of the current model: the base model or a fine-tuned one."""
        return self._state.fine_tuned_model_name or self.settings.model_name

    @property
    def lora_alpha(self) -> float | None:
        """LoRA's alpha: `lora_rank` times `lora_alpha_scale`. None when the settings have no rank."""
        return self.settings.lora_alpha

    @property
    def max_message_rounds(self) -> int:
        """The maximum number of rounds of the protocol. Raises RequestError if there is no protocol."""
        if self.protocol is None:
            raise RequestError(f"group '{self.group_name}' plays no protocol")
        return self.protocol.max_rounds

    @property
    def num_epochs(self) -> int | None:
        """The passes of a job over its data; None when the adapter's config decides."""
        return self.settings.num_epochs

    @property
    def rl_learning_rate(self) -> float | None:
        """The learning rate of GRPO and DPO; None when the adapter's config decides."""
        return self.settings.rl_learning_rate

    @property
    def training_client_type(self) -> ClientType:
        """The kind of backend that jobs go to: OpenAI, a language-model server, another adapter, or none."""
        adapter = self.jobs.adapter
        if isinstance(adapter, LmServerAdapter):
            return "lm_server"
        if isinstance(adapter, OpenAiJobs):
            return "openai"
        return "adapter" if adapter.capabilities().methods else "none"

    @property
    def language_model_client(self) -> LanguageModelClient:
        """The client that controls the server's engine. Raises CapabilityError if there is no server."""
        if not isinstance(self.jobs.adapter, LmServerAdapter):
            raise CapabilityError(f"group '{self.group_name}' does not train at a language-model server")
        return self.jobs.adapter.server

    @cached_property
    def openai_client(self) -> AsyncOpenAI:
        """The client of the OpenAI API: the adapter's, or one with the key from the environment."""
        if isinstance(self.jobs.adapter, OpenAiJobs):
            return self.jobs.adapter.client
        from openai import AsyncOpenAI

        return AsyncOpenAI()

    def agent_ids_and_names(self) -> Iterable[tuple[int, str]]:
        """Return the id and name of each agent. The id is the agent's index in the protocol, from 0."""
        order = list(self.agent_wholes if self.protocol is None else self.protocol.agents)
        return ((order.index(name), name) for name in self.agent_wholes)

    async def create_supervised_fine_tune_job(
        self,
        rollouts_per_agent: Rollouts,
        guess_replaced_rollouts: Rollouts | None = None,
        job_name: str | None = None,
    ) -> JobResult:
        """Make a job that imitates each agent's answers in its rollouts.

        Args:
            rollouts_per_agent: finished episodes for each agent to imitate.
            guess_replaced_rollouts: further episodes, for verifiers only. The truth replaces their decision.
            job_name: the name of the job. Name and content are its idempotency key. The default name is
                derived from the data.

        Raises JobNameTakenError for the name of another job. Raises RequestError for an agent outside the
        group, or for replaced guesses of an agent that is not a verifier.
        """
        guess_replaced_rollouts = guess_replaced_rollouts or {}
        self._require_own({**rollouts_per_agent, **guess_replaced_rollouts})
        for name in guess_replaced_rollouts:
            if not self.agent_wholes[name].may_decide:
                raise RequestError(f"agent '{name}' is not a verifier: it has no guess to replace")
        data = supervised_data(rollouts_per_agent, guess_replaced_rollouts, self.jobs.model)
        return await self._make_fine_tune_api_call(data, "supervised", job_name)

    async def create_dpo_fine_tune_job(
        self,
        positive_examples_per_agent: Steps,
        negative_examples_per_agent: Steps,
        job_name: str | None = None,
    ) -> JobResult:
        """Make a DPO job from pairs of steps. Each positive step is preferred to the negative one.

        Raises RequestError if the steps of a pair answer different prompts.
        """
        self._require_own(positive_examples_per_agent)
        data = dpo_data(positive_examples_per_agent, negative_examples_per_agent, self.jobs.model)
        return await self._make_fine_tune_api_call(data, "dpo", job_name)

    async def create_grpo_fine_tune_job(
        self,
        rollouts_per_agent: Rollouts,
        rewards: Mapping[str, float] | None = None,
        job_name: str | None = None,
    ) -> JobResult:
        """Make a GRPO job that compares each agent's rollouts on the same example.

        `rewards` maps episode ids to rewards. By default, the agent's reward in the play is taken.
        """
        self._require_own(rollouts_per_agent)
        data = grpo_data(rollouts_per_agent, rewards, self.jobs.model)
        return await self._make_fine_tune_api_call(data, "grpo", job_name)

    @property
    def _job(self) -> TrainingJobRef | None:
        """The last job, or None if it was skipped."""
        return None if isinstance(self._last, Skipped) else self._state.fine_tune_job

    async def get_fine_tune_job_status(self) -> JobStatus:
        """Return the status of the last job; `not_found` if there is none or the backend has lost it."""
        await self._take_up()
        ref = self._job
        return "not_found" if ref is None else _STATUSES[(await self.jobs.status(ref)).status]

    async def fine_tune_job_failed(self) -> bool:
        """Return whether the last job failed, was cancelled or is lost, and should be made again."""
        status = await self.get_fine_tune_job_status()
        return self._job is not None and status in ("failed", "cancelled", "not_found")

    async def get_fine_tune_job_error_repr(self) -> str:
        """Return the backend's reason why the last job failed, or why there is none. May be empty."""
        await self._take_up()
        ref = self._state.fine_tune_job
        if isinstance(self._last, Skipped):
            return self._last.reason
        if ref is None:
            return str(TrainingJobNotFoundClientError(None))
        return (await self.jobs.status(ref)).message or ""

    async def wait_for_fine_tune_job(self, timeout: float = 86400.0, poll_interval: float = 10.0) -> None:  # noqa: ASYNC109
        """Wait until the last job is completed. Return at once if there is no job.

        Raises TrainingError if the job fails, or is cancelled after `timeout` seconds.
        """
        await self._take_up()
        if self._job is not None:
            await self.jobs.wait(self._job, timeout, poll_interval)

    async def switch_to_next_model(self) -> ModelVersion | None:
        """Sample from the weights that the last job made, and return the current version.

        The switch is atomic and journalled. After a skipped job, the version stays the same. Raises
        TrainingError if the job did not succeed or made no new weights.
        """
        await self._take_up()
        ref, now = self._state.fine_tune_job, self.jobs.version
        if isinstance(self._last, Skipped):
            return now
        if ref is None:
            raise TrainingJobNotFoundClientError(None)
        entry = None if now is None else self.jobs.log.state.versions.get(now.number)
        if entry is not None and entry.job.run_id == ref.run_id:
            return now
        status = await self.jobs.status(ref)
        require_completed(ref, status)
        version, is_hosted = status.version, isinstance(self.jobs.adapter, OpenAiJobs)
        # After `set_state` with the job's model, the engine already samples from it.
        if not is_hosted or version is None or now is None or version.location != now.location:
            await self.jobs.adopt(ref, status)
        await self._keep(self._state.model_copy(update={"version": self.jobs.version}))
        return self.jobs.version

    def lineage(self) -> list[LineageEntry]:
        """Return the versions after the base, oldest first, each with its job, data and metrics."""
        return [*self.jobs.log.state.versions.values()]

    def get_state(self) -> SharedModelGroupState:
        """Return the group's current state."""
        return self._state

    def get_state_dict(self) -> dict[str, Any]:
        """Return the group's current state as JSON."""
        return self._state.model_dump(mode="json")

    def set_state(self, checkpoint: SharedModelGroupState | dict[str, Any]) -> None:
        """Continue from a state: the next episodes and the next job use its version.

        The next call that needs the model applies the state and journals it: `wait_for_ready`, `eval`, a job,
        or `switch_to_next_model`. Raises RequestError for an invalid state, and then changes nothing.
        """
        try:
            state = SharedModelGroupState.model_validate(checkpoint)
        except ValidationError as error:
            raise RequestError(f"this is not the state of a group: {error}") from error
        version = state.version
        known = None if version is None else self.jobs.log.state.versions.get(version.number)
        if version is not None and known is not None and known.version.digest != version.digest:
            raise RequestError(
                f"version {version.number} of group '{self.group_name}' is {known.version.location}, but in "
                f"this state it is {version.location}: is it the state of another group?"
            )
        self._state, self._is_given, self._is_taken_up = state, True, False
        self._last = state.fine_tune_job

    async def train(self) -> None:
        """Unload the engine of the language-model server, if its adapter sets `free_engine`."""
        adapter = self.jobs.adapter
        trains = self.is_trainable and not self.settings.dry_run
        if trains and isinstance(adapter, LmServerAdapter) and adapter.adapter_config.free_engine:
            await adapter.server.stop_engine()

    async def eval(self) -> None:
        """Make the engine sample from the current model."""
        if isinstance(self.jobs.adapter, LmServerAdapter):
            await self.jobs.adapter.server.start_engine()
        await self._take_up()
        if self._state.version is not None:
            await self.jobs.sample_from(self._state.version)

    async def wait_for_ready(self, timeout: float = 300.0) -> None:  # noqa: ASYNC109  # the reference's name
        """Wait until the backend is healthy, then apply the given state, or the journal's.

        Raises TimeoutError after `timeout` seconds, and ServerVersionError for a language-model server of
        another major version.
        """
        adapter = self.jobs.adapter
        if isinstance(adapter, LmServerAdapter):
            await adapter.server.wait_for_ready(timeout)
        try:
            async with asyncio.timeout(timeout):
                while not await adapter.is_healthy():  # noqa: ASYNC110  a server elsewhere sends no event
                    await asyncio.sleep(_POLL)
        except TimeoutError as error:
            why = f"its backend '{adapter.adapter_config.type_name}' is not healthy"
            why += f": {adapter.unhealthy_because}" if adapter.unhealthy_because else ""
            raise TimeoutError(
                f"group '{self.group_name}' is not ready after {timeout:g} s: {why}"
            ) from error
        await self._take_up()

    async def _take_up(self) -> None:
        """Apply the given state, or the journal's, once."""
        if self._is_taken_up:
            return
        begin = self.jobs.log.state.start if self._is_given else None
        await self.jobs.take_up(self._state.version or begin)
        self._state = self._state.model_copy(update={"version": self.jobs.version})
        if self._is_given:
            version = self._state.version
            if version is not None and version.number and version.number not in self.jobs.log.state.versions:
                # The version was made elsewhere. Add it to the lineage, so that its number stays taken.
                backend = self.jobs.adapter.adapter_config.type_name
                made_by = TrainingJobRef(run_id=version.location, backend=backend)
                await self.jobs.log.add(LineageEntry(version=version, job=made_by))
            # A job that was made elsewhere has no version number yet, and gets one when it is done.
            await self.jobs.adapter.count_from(self.jobs.log.state.newest_number)
            await self._keep(self._state)
        self._is_given, self._is_taken_up = False, True

    def _require_own(self, per_agent: Mapping[str, Any]) -> None:
        for name in per_agent:
            if name not in self.agent_wholes:
                known = ", ".join(self.agent_wholes)
                raise RequestError(f"group '{self.group_name}' has no agent '{name}'; agents: {known}")

    async def _make_fine_tune_api_call(
        self, fine_tune_dataset: Sequence[Sequence[TrainingUnit]], method: Method, job_name: str | None = None
    ) -> JobResult:
        """Submit the data set as a job, or return why there is none."""
        data = TrajectoryCollection(trajectories=fine_tune_dataset, run_id=job_name or "", method=method)
        result: JobResult | None = self.jobs.reason_to_skip(len(data))
        if result is None:
            await self._take_up()
            if job_name is None:
                # The default name is different for different content.
                start = None if self.settings.fine_tune_from_scratch else self.jobs.version
                content = content_hash([data.data_hash(), self.settings.hyperparameters.given_values()])
                begun = 0 if start is None else start.number
                job_name = f"{self.group_name}-from-v{begun}-{content[:12]}"
            data = data.model_copy(update={"run_id": await self._attempt(job_name)})
            result = await self._make_fine_tune_api_call_openai(data)
        self._last = result
        if isinstance(result, TrainingJobRef):
            await self._keep(self._state.model_copy(update={"fine_tune_job": result}))
        return result

    async def _make_fine_tune_api_call_openai(self, fine_tune_dataset: TrajectoryCollection) -> JobResult:
        """Submit the job. Raises CapabilityError for a method that the backend does not support."""
        return await self.jobs.submit(fine_tune_dataset)

    _make_fine_tune_api_call_lm_server = _make_fine_tune_api_call_openai

    async def _get_openai_fine_tune_job(self) -> FineTuningJob:
        """Return the job as the OpenAI API reports it. Raises TrainingJobNotFoundClientError."""
        return await self._fine_tune_job("openai")

    async def _get_lm_server_fine_tune_job(self) -> FineTuningJob:
        """Return the job as the language-model server reports it. Raises TrainingJobNotFoundClientError."""
        return await self._fine_tune_job("lm_server")

    async def _fine_tune_job(self, client: ClientType) -> FineTuningJob:
        ref, adapter = self._state.fine_tune_job, self.jobs.adapter
        if ref is None:
            raise TrainingJobNotFoundClientError(None)
        if not isinstance(adapter, OpenAiJobs) or self.training_client_type != client:
            raise TrainingError(f"group '{self.group_name}' does not train through '{client}'")
        return await adapter.job(ref)

    async def _attempt(self, job_name: str) -> str:
        """Return the name of a job's next attempt. It changes only after the last attempt failed."""
        ref = self._state.fine_tune_job
        last = "" if ref is None else ref.run_id
        retry = re.fullmatch(rf"{re.escape(job_name + _RETRY)}(\d+)", last)
        if last != job_name and retry is None:
            return job_name
        self._last = ref  # This is about that job, also if another one was skipped since.
        if not await self.fine_tune_job_failed():
            return last
        return f"{job_name}{_RETRY}{int(retry[1]) + 1 if retry else 1}"

    async def _keep(self, state: SharedModelGroupState) -> None:
        """Journal the state, then make it the group's state."""
        await self.jobs.log.add(GroupChanged(state=state.model_dump(mode="json")))
        self._state = state


def _by_name(group: str, agents: Iterable[GroupAgent]) -> dict[str, GroupAgent]:
    """Return the agents by name. Raises RequestError if they do not fit together."""
    named: dict[str, GroupAgent] = {}
    for agent in agents:
        name, belongs_to = agent.agent_name, agent.shared_model_group or agent.agent_name
        if belongs_to != group:
            raise RequestError(f"agent '{name}' belongs to the group '{belongs_to}', not to '{group}'")
        if name in named:
            raise RequestError(f"group '{group}' has two agents called '{name}'")
        named[name] = agent
        first = next(iter(named.values()))
        for setting, value in asdict(first.settings).items():
            if value != (its := getattr(agent.settings, setting)):
                raise RequestError(
                    f"group '{group}': agents that share a model must agree on {setting}, but it is "
                    f"{value!r} for '{first.agent_name}' and {its!r} for '{name}'"
                )
    if not named:
        raise RequestError(f"group '{group}' has no agents")
    return named


PureTextSharedModelGroup = OpenAiSharedModelGroup = SharedModelGroup
"""The class's names in Neural Interactive Proofs."""

OpenAiSharedModelGroupState = SharedModelGroupState
