"""A shared model group: the agents that share one trainable model, its jobs and its versions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from etude.core.errors import RequestError
from etude.core.job import ModelVersion, Skipped, TrainingJobRef, TrainingStatusEnum
from etude.groups.agents import GroupAgent, ModelSettings, agreed, by_name
from etude.groups.data import Rollouts, Steps
from etude.groups.state import SharedModelGroupState
from etude.protocols.protocol import Protocol

JobStatus: TypeAlias = Literal["pending", "running", "succeeded", "failed", "cancelled", "not_found"]
"""The status of a fine-tune job."""

STATUSES: dict[TrainingStatusEnum, JobStatus] = {
    TrainingStatusEnum.PENDING: "pending",
    TrainingStatusEnum.RUNNING: "running",
    TrainingStatusEnum.COMPLETED: "succeeded",
    TrainingStatusEnum.FAILED: "failed",
    TrainingStatusEnum.CANCELED: "cancelled",
    TrainingStatusEnum.NOT_FOUND: "not_found",
}
"""The statuses of groups for those of adapters."""

JobResult: TypeAlias = TrainingJobRef | Skipped
"""The job that was made; or why there is none: `Frozen`, `DryRun`, or `Skipped` for too little data."""

NOTHING: Rollouts = MappingProxyType({})


class SharedModelGroup(ABC):
    """Agents that share one model. It is fine-tuned on the data of all of them."""

    def __init__(
        self, group_name: str, agent_wholes: Iterable[GroupAgent], protocol: Protocol | None = None
    ) -> None:
        """`protocol` is the one that the agents play, if any.

        Raises RequestError when the agents do not belong together: of another group, not in the
        protocol, or different in anything that the model depends on.
        """
        self.group_name = group_name
        self.agent_wholes: Mapping[str, GroupAgent] = by_name(group_name, agent_wholes)
        self.settings: ModelSettings = agreed(group_name, self.agent_wholes)
        self.protocol = protocol
        for name in self.agent_wholes if protocol is not None else ():
            if protocol is not None and name not in protocol.agents:
                known = ", ".join(protocol.agents)
                raise RequestError(f"protocol '{protocol.name}' has no agent '{name}'; agents: {known}")

    @property
    def is_trainable(self) -> bool:
        """Whether the model can be trained."""
        return not self.settings.freeze_agent

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
    @abstractmethod
    def model_name(self) -> str:
        """The current model: the base model, or a fine-tuned one."""

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

    @abstractmethod
    async def create_supervised_fine_tune_job(
        self,
        rollouts_per_agent: Rollouts,
        guess_replaced_rollouts: Rollouts = NOTHING,
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

    @abstractmethod
    async def create_dpo_fine_tune_job(
        self,
        positive_examples_per_agent: Steps,
        negative_examples_per_agent: Steps,
        job_name: str | None = None,
    ) -> JobResult:
        """Make a DPO job of pairs of steps: for each agent, the first is preferred to the second.

        The steps of a pair answer the same prompt. Raises RequestError for those that do not.
        """

    @abstractmethod
    async def create_grpo_fine_tune_job(
        self,
        rollouts_per_agent: Rollouts,
        rewards: Mapping[str, float] | None = None,
        job_name: str | None = None,
    ) -> JobResult:
        """Make a GRPO job of rollouts, each agent's compared with its others on the same example.

        `rewards` are by the ids of the episodes; by default they are what the agent earned in the play.
        """

    @abstractmethod
    async def get_fine_tune_job_status(self) -> JobStatus:
        """The status of the last job; `not_found` when there is none, or the backend does not know it."""

    async def fine_tune_job_failed(self) -> bool:
        """Whether there is a job that failed, was cancelled or is lost, and should be made again."""
        status = await self.get_fine_tune_job_status()
        return self.get_state().fine_tune_job is not None and status in ("failed", "cancelled", "not_found")

    @abstractmethod
    async def get_fine_tune_job_error_repr(self) -> str:
        """The backend's reason why the last job failed, or why there is none; may be empty."""

    @abstractmethod
    async def switch_to_next_model(self) -> ModelVersion | None:
        """Sample from the weights that the last job made; the version that is sampled from now.

        It happens whole or not at all, and is journalled. After a job that was skipped the version
        stays as it is. Raises TrainingError when the job did not succeed, or made nothing new.
        """

    def get_state(self) -> SharedModelGroupState:
        """The state."""
        return SharedModelGroupState.model_validate(self.get_state_dict())

    @abstractmethod
    def get_state_dict(self) -> dict[str, Any]:
        """The state as JSON."""

    @abstractmethod
    def set_state(self, checkpoint: SharedModelGroupState | dict[str, Any]) -> None:
        """Go on from a state: the next episodes and the next job are from its version.

        Raises RequestError for what is no state, and then changes nothing.
        """

    async def train(self) -> None:  # noqa: B027  # a hook with a sound default
        """Prepare for training: free the memory of sampling, where both do not fit."""

    async def eval(self) -> None:  # noqa: B027  # a hook with a sound default
        """Prepare for sampling."""

    async def wait_for_ready(self, timeout: float = 300.0) -> None:  # noqa: ASYNC109, B027  # the reference's name
        """Wait until the group can sample and train. Raises TimeoutError after `timeout` seconds."""
