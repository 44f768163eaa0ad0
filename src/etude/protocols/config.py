"""The workflow `protocol` and the evaluator `protocol_reward` of a config."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias

from pydantic import Field

from etude.config.changeable import CHANGEABLE
from etude.config.component import EvaluatorConfig, WorkflowConfig
from etude.config.references import AgentRef, LlmRef, RefersToAgent
from etude.config.registry import register_evaluator, register_workflow
from etude.core.errors import RequestError
from etude.core.evaluation import EvalInputItem, EvalOutputItem
from etude.core.interfaces import Evaluator
from etude.protocols.growing import Widths, most_calls
from etude.protocols.protocol import Protocol
from etude.protocols.registry import find_protocol, find_scenario
from etude.protocols.tree import EpisodeTree
from etude.protocols.workflow import RETRIES, ProtocolWorkflow
from etude.rewards.evaluator import scored
from etude.rollout.workflow import Workflow

if TYPE_CHECKING:
    from etude.config.builder import Builder


class ProtocolReward(Evaluator):
    """Scores a play by what one agent earned; where it branched, by the value of its root."""

    def __init__(self, agent: str) -> None:
        self.agent = agent

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        """Score one episode. Raises RequestError when no protocol was played, or not with this agent."""
        tree = EpisodeTree.from_json(item.output_obj)
        endings = Counter(leaf.ending for leaf in tree.leaves())
        return scored(item, (tree.value(None, self.agent), dict(endings)))


_Width: TypeAlias = Annotated[int, Field(ge=1)]


class ProtocolWorkflowConfig(WorkflowConfig, name="protocol"):
    """Agents that play a protocol."""

    target_functions: ClassVar[tuple[str, ...]] = ("*",)

    protocol: str = Field(
        description="`nip`, `adp`, `debate`, `merlin_arthur`, `mnip`, `solo_verifier`, or `module:name`."
    )
    arguments: dict[str, Any] = Field(default_factory=dict, description="Parameters of the protocol.")
    scenario: str = Field(description="The task: a registered scenario, or `module:name`.")
    scenario_arguments: dict[str, Any] = Field(
        default_factory=dict, description="Parameters of the scenario."
    )
    policy: LlmRef | None = Field(
        default=None,
        description="The model of agents that `policies` does not name; left out: the trained one.",
    )
    policies: Annotated[dict[str, LlmRef], RefersToAgent()] = Field(
        default_factory=dict, description="The models of agents by name."
    )
    widths: _Width | list[_Width] | Annotated[dict[str, _Width | list[_Width]], RefersToAgent()] = Field(
        default=1,
        description="Answers for each turn: a number, a list by round, or these by agent. 1 is a rollout.",
    )
    retries: int = Field(
        default=RETRIES, ge=0, description="How often a malformed answer is asked for again before it counts."
    )
    sampling: Annotated[dict[str, dict[str, Any]], RefersToAgent()] = Field(
        default_factory=dict,
        description="Sampling parameters by agent, such as `{prover: {max_tokens: 200}}`.",
    )
    timeout: Annotated[float | None, CHANGEABLE] = Field(
        default=None, gt=0, description="Seconds that a play may take."
    )

    def agents(self) -> Mapping[str, str | None]:
        """Those of the protocol. Raises RequestError when it cannot be made."""
        protocol = find_protocol(self.protocol, self.arguments)
        return {agent: self.policies.get(agent, self.policy) for agent in protocol.agents}


@register_workflow(config_type=ProtocolWorkflowConfig)
async def protocol_workflow(config: ProtocolWorkflowConfig, builder: Builder) -> AsyncIterator[Workflow]:
    """Raises RequestError for what does not fit the protocol, and for a tree of more than `max_calls`."""
    protocol = find_protocol(config.protocol, config.arguments)
    widths = Widths.of(config.widths)
    calls, most = most_calls(protocol, widths), builder.config.eval.general.max_calls
    if most is not None and calls > most:
        raise RequestError(
            f"a play of '{protocol.name}' with these widths can take {calls} calls, and "
            f"eval.general.max_calls is {most}; choose smaller widths or fewer rounds, or raise the limit"
        )
    workflow = ProtocolWorkflow(
        protocol,
        find_scenario(config.scenario, config.scenario_arguments),
        _policies(config, protocol),
        widths,
        retries=config.retries,
        sampling=config.sampling,
        seed=builder.config.finetuning.seed,
    )
    yield Workflow(protocol.name, workflow, config.timeout)


def _policies(config: ProtocolWorkflowConfig, protocol: Protocol) -> dict[str, str] | str | None:
    """The models by agent; one for all where none has its own."""
    if not config.policies:
        return config.policy
    others = {} if config.policy is None else dict.fromkeys(protocol.agents, config.policy)
    return others | config.policies


class ProtocolRewardConfig(EvaluatorConfig, name="protocol_reward"):
    """The sum of an agent's payoffs in the protocol."""

    agent: AgentRef = Field(description="The agent, such as `verifier`.")


@register_evaluator(config_type=ProtocolRewardConfig)
async def protocol_reward(config: ProtocolRewardConfig, builder: Builder) -> AsyncIterator[ProtocolReward]:
    """The registered component `protocol_reward`."""
    yield ProtocolReward(config.agent)
