"""A shared model group: the agents that share one trainable model, its jobs and its versions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from etude.backends.openai_api import TrainingJobNotFoundClientError
from etude.backends.openai_jobs import OpenAiJobs
from etude.core.edge import TrainingUnit, TrajectoryCollection
from etude.core.errors import RequestError
from etude.core.job import ModelVersion, Skipped, TrainingJobRef, TrainingStatusEnum
from etude.core.keys import content_hash
from etude.core.trajectory import Method
from etude.groups.agents import (
    GroupAgent,
    ModelSettings,
    Rollouts,
    Steps,
    agreed,
    by_name,
    dpo_data,
    grpo_data,
    supervised_data,
)
from etude.groups.line import LineRules, ModelLine, require_completed
from etude.groups.lineage import LineageEntry
from etude.groups.state import HostedState, SharedModelGroupState, by_own_names, read_state
from etude.jobs.folders import data_hash
from etude.protocols.protocol import Protocol

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
"""The job that was made; or why there is none: `Frozen`, `DryRun`, or `Skipped` for too little data."""

_LOG = logging.getLogger("etude.groups")
_POLL = 0.5
_NOTHING: Rollouts = MappingProxyType({})
_RETRY = "-retry-"


class SharedModelGroup:
    """Agents that share one model. It is fine-tuned on the data of all of them.

    Every job and every switch is journalled under the group's name: a group of that name in another process
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

        `protocol` is the one that the agents play, if any. Raises RequestError when the agents do not belong
        together: of another group, not in the protocol, or different in anything that the model depends on;
        CapabilityError for hyperparameters of their settings that the adapter cannot take.
        """
        self.group_name = group_name
        self.agent_wholes: Mapping[str, GroupAgent] = by_name(group_name, agent_wholes)
        self.settings: ModelSettings = agreed(group_name, self.agent_wholes)
        self.protocol = protocol
        for name in self.agent_wholes:
            if protocol is not None and name not in protocol.agents:
                known = ", ".join(protocol.agents)
                raise RequestError(f"protocol '{protocol.name}' has no agent '{name}'; agents: {known}")
        self.line = line
        settings = self.settings
        line.rules = LineRules(
            frozen=settings.freeze_agent,
            dry_run=settings.dry_run,
            min_rows=settings.min_rows,
            from_scratch=settings.fine_tune_from_scratch,
        )
        if not settings.freeze_agent:
            line.use_hyperparameters(settings.hyperparameters)
        self._state = SharedModelGroupState()
        self._is_given = False
        """Whether the state is one that `set_state` was given, and not the journal's."""
        self._is_taken_up = False
        """Whether model and backend are at the state's version."""
        self._last: JobResult | None = None

    @property
    def is_trainable(self) -> bool:
        """Whether the model can be trained: not frozen, and somewhere to train it."""
        return not self.settings.freeze_agent and bool(self.line.adapter.capabilities().methods)

    @property
    def model_name(self) -> str:
        """The current model: the base model, or a fine-tuned one."""
        return self._state.fine_tuned_model_name or self.settings.model_name

    @property
    def lora_alpha(self) -> float | None:
        """The alpha of the LoRA weights: their rank times its scale. None where the settings have no rank."""
        return self.settings.lora_alpha

    @property
    def max_message_rounds(self) -> int:
        """The most rounds of the protocol. Raises RequestError when there is none."""
        if self.protocol is None:
            raise RequestError(f"group '{self.group_name}' plays no protocol")
        return self.protocol.max_rounds

    @property
    def num_epochs(self) -> int | None:
        """Times that a job goes over its data; None when the adapter's config says."""
        return self.settings.num_epochs

    @property
    def rl_learning_rate(self) -> float | None:
        """The learning rate of reinforcement learning and DPO; None when the adapter's config says."""
        return self.settings.rl_learning_rate

    def agent_ids_and_names(self) -> Iterable[tuple[int, str]]:
        """The id and the name of each agent. An id is the agent's index in the protocol, from 0."""
        order = list(self.agent_wholes if self.protocol is None else self.protocol.agents)
        return ((order.index(name), name) for name in self.agent_wholes)

    async def create_supervised_fine_tune_job(
        self,
        rollouts_per_agent: Rollouts,
        guess_replaced_rollouts: Rollouts = _NOTHING,
        job_name: str | None = None,
    ) -> JobResult:
        """Make a job that imitates what each agent said in its rollouts.

        Args:
            rollouts_per_agent: finished episodes, for each agent those that it is to imitate.
            guess_replaced_rollouts: further episodes, for verifiers only: their decision is replaced by
                the truth.
            job_name: names the job, and is with its content its idempotency key; made from the data by
                default.

        Raises JobNameTakenError for the name of another job, and RequestError for an agent that is not of
        the group, or no verifier where one is needed.
        """
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
        """Make a DPO job of pairs of steps: for each agent, the first is preferred to the second.

        The steps of a pair answer the same prompt. Raises RequestError for those that do not.
        """
        self._require_own(positive_examples_per_agent)
        data = dpo_data(positive_examples_per_agent, negative_examples_per_agent, self.line.model)
        return await self._make_fine_tune_api_call(data, "dpo", job_name)

    async def create_grpo_fine_tune_job(
        self,
        rollouts_per_agent: Rollouts,
        rewards: Mapping[str, float] | None = None,
        job_name: str | None = None,
    ) -> JobResult:
        """Make a GRPO job of rollouts, each agent's compared with its others on the same example.

        `rewards` are by the ids of the episodes; by default they are what the agent earned in the play.
        """
        self._require_own(rollouts_per_agent)
        data = grpo_data(rollouts_per_agent, rewards, self.line.model)
        return await self._make_fine_tune_api_call(data, "grpo", job_name)

    async def get_fine_tune_job_status(self) -> JobStatus:
        """The status of the last job; `not_found` when there is none, or the backend does not know it."""
        await self._take_up()
        ref = self._state.fine_tune_job
        return "not_found" if ref is None else _STATUSES[(await self.line.status(ref)).status]

    async def fine_tune_job_failed(self) -> bool:
        """Whether there is a job that failed, was cancelled or is lost, and should be made again."""
        status = await self.get_fine_tune_job_status()
        return self._state.fine_tune_job is not None and status in ("failed", "cancelled", "not_found")

    async def get_fine_tune_job_error_repr(self) -> str:
        """The backend's reason why the last job failed, or why there is none; may be empty."""
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
        """Sample from the weights that the last job made; the version that is sampled from now.

        It happens whole or not at all, and is journalled. After a job that was skipped the version
        stays as it is. Raises TrainingError when the job did not succeed, or made nothing new.
        """
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
        require_completed(ref, status)
        made, is_hosted = status.version, isinstance(self.line.adapter, OpenAiJobs)
        # After a state that says so, the model that the job made is sampled from already.
        if not is_hosted or made is None or now is None or made.location != now.location:
            await self.line.adopt(ref, status)
        await self._keep(self._state.model_copy(update={"version": self.line.version}))
        return self.line.version

    def lineage(self) -> list[LineageEntry]:
        """The versions since the base, oldest first, with the job, the data and the metrics of each."""
        return self.line.log.entries()

    def get_state(self) -> SharedModelGroupState:
        """The state."""
        return self._state

    def get_state_dict(self) -> dict[str, Any]:
        """The state as JSON."""
        return self._state.model_dump(mode="json")

    def set_state(self, checkpoint: SharedModelGroupState | dict[str, Any]) -> None:
        """Go on from a state: the next episodes and the next job are from its version.

        States of Neural Interactive Proofs are understood too. The next call that needs the model takes the
        state up, and journals it: `wait_for_ready`, `eval`, a job, or `switch_to_next_model`. Raises
        RequestError for what is no state, and then changes nothing.
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
        """Prepare for training: free the memory of sampling, where both do not fit."""

    async def eval(self) -> None:
        """Prepare for sampling: have the engine sample from the current model."""
        await self._take_up()
        if self._state.version is not None:
            await self.line.sample_from(self._state.version)

    async def wait_for_ready(self, timeout: float = 300.0) -> None:  # noqa: ASYNC109  # the reference's name
        """Wait until the backend answers, then take up the state: the one given, or the journal's.

        Logs what it waits for. Raises TimeoutError after `timeout` seconds.
        """
        adapter, who = self.line.adapter, f"group '{self.group_name}'"
        backend = f"the training backend '{adapter.adapter_config.type_name}'"
        try:
            async with asyncio.timeout(timeout) as limit:
                if not await adapter.is_healthy():
                    why = f": {adapter.unhealthy_because}" if adapter.unhealthy_because else ""
                    told = f"{who} waits up to {timeout:g} s for {backend}, which is not healthy{why}"
                    _LOG.warning("%s", told)
                    # A server in another process sends no event when it has started.
                    while not await adapter.is_healthy():  # noqa: ASYNC110
                        await asyncio.sleep(min(_POLL, timeout))
                    _LOG.warning("%s goes on: %s is healthy", who, backend)
        except TimeoutError as error:
            if not limit.expired():
                raise
            why = f" ({adapter.unhealthy_because})" if adapter.unhealthy_because else ""
            late = f"{who} is not ready after {timeout:g} s: {backend} is not healthy{why}"
            raise TimeoutError(late) from error
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
            version = self._state.version
            if version is not None and version.number and self.line.log.entry(version.number) is None:
                # It was made elsewhere, and its number is taken.
                backend = self.line.adapter.adapter_config.type_name
                made_by = TrainingJobRef(run_id=version.location, backend=backend)
                await self.line.log.add(LineageEntry(version=version, job=made_by))
            # A job that was made elsewhere has no number, and gets one when it is done.
            await self.line.adapter.count_from(self.line.log.newest())
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
        """Submit the data set as a job, or say why there is none."""
        data = TrajectoryCollection(trajectories=fine_tune_dataset, run_id=job_name or "", method=method)
        result: JobResult | None = self.line.reason_to_skip(len(data))
        if result is None:
            await self._take_up()
            data = data.model_copy(update={"run_id": await self._attempt(job_name or self._name_of(data))})
            result = await self._submit(data)
        self._last = result
        if isinstance(result, TrainingJobRef):
            await self._keep(self._state.model_copy(update={"fine_tune_job": result}))
        return result

    async def _submit(self, data: TrajectoryCollection) -> JobResult:
        """Make the job at the backend."""
        return await self.line.submit(data)

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

    async def _keep(self, state: SharedModelGroupState) -> None:
        """Journal the state; only then it is the group's."""
        await self.line.log.put_state(state.model_dump(mode="json"))
        self._state = state


PureTextSharedModelGroup = SharedModelGroup
"""The name that it has in Neural Interactive Proofs."""
