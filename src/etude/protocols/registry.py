"""Protocols and scenarios by name, and the components that a config makes of them."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias, TypeVar

from pydantic import Field

from etude.config.component import CHANGEABLE, EvaluatorConfig, WorkflowConfig
from etude.config.import_path import import_object, is_import_path, where_raised
from etude.config.nearest import alternatives
from etude.config.references import AgentRef, LlmRef, Refers
from etude.config.registry import register_evaluator, register_workflow
from etude.core.errors import EtudeError, RequestError
from etude.core.evaluation import EvalInputItem, EvalOutputItem
from etude.core.interfaces import Evaluator
from etude.protocols.growing import Widths, most_calls
from etude.protocols.named import PROTOCOLS
from etude.protocols.protocol import Protocol, within
from etude.protocols.scenario import Scenario
from etude.protocols.tree import EpisodeTree
from etude.protocols.workflow import RETRIES, ProtocolWorkflow
from etude.rewards.evaluator import scored
from etude.rollout.workflow import Workflow

if TYPE_CHECKING:
    from etude.config.builder import Builder

FactoryT = TypeVar("FactoryT", bound=Callable[..., Any])

_METHODS = ("render", "parse", "truth", "stance")
_scenarios: dict[str, Callable[..., Scenario]] = {}


def register_scenario(name: str) -> Callable[[FactoryT], FactoryT]:
    """Decorate a scenario class, or a function that makes a scenario, to name it in configs.

    Raises RequestError when another module has the name.
    """

    def register(factory: FactoryT) -> FactoryT:
        known = _scenarios.get(name, factory)
        homes = [
            f"{made.__module__}.{getattr(made, '__qualname__', type(made).__name__)}"
            for made in (known, factory)
        ]
        if len(set(homes)) > 1:
            raise RequestError(f"two scenarios are called '{name}': {' and '.join(homes)}")
        _scenarios[name] = factory
        return factory

    return register


def find_protocol(name: str, arguments: Mapping[str, Any]) -> Protocol:
    """A named protocol, or one that an import path names: a Protocol, or a function that makes one.

    Raises RequestError for an unknown name and for arguments that do not fit.
    """
    protocol = _make("protocol", name, PROTOCOLS, arguments)
    if not isinstance(protocol, Protocol):
        raise RequestError(f"protocol '{name}': expected an etude.protocols.Protocol, found {protocol!r:.80}")
    return protocol


def find_scenario(name: str, arguments: Mapping[str, Any]) -> Scenario:
    """A registered scenario, or one that an import path names: a scenario, its class, or its maker.

    Raises RequestError for an unknown name, for arguments that do not fit, and for missing methods.
    """
    scenario: Scenario = _make("scenario", name, _scenarios, arguments)
    lacking = [method for method in _METHODS if not callable(getattr(scenario, method, None))]
    if lacking:
        raise RequestError(f"scenario '{name}' has no method '{lacking[0]}'; it needs {', '.join(_METHODS)}")
    return scenario


def _make(kind: str, name: str, known: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    factory: Any = import_object(name) if is_import_path(name) else known.get(name)
    if factory is None:
        raise RequestError(
            f"there is no {kind} '{name}'" + alternatives(name, known) + ", or module:name of your own"
        )
    if isinstance(factory, Protocol) or (not isinstance(factory, type) and hasattr(factory, "render")):
        if arguments:
            raise RequestError(f"'{name}' is no function, and takes no arguments: {', '.join(arguments)}")
        return factory
    reason = f"'{name}' cannot be made with {dict(arguments)}"
    try:
        inspect.signature(factory).bind(**arguments)
    except ValueError:
        pass  # A callable without a signature.
    except TypeError as error:
        raise RequestError(f"{reason}: {error}{_parameters(factory, arguments)}") from error
    try:
        return factory(**arguments)
    except EtudeError:
        raise
    except Exception as error:
        raise RequestError(f"{reason}: {where_raised(error)}") from error


def _parameters(factory: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """The parameters of a factory, with the nearest to the first argument that is not among them."""
    names = [name for name in inspect.signature(factory).parameters if name not in ("args", "kwargs")]
    unknown = next((name for name in arguments if name not in names), None)
    return "" if unknown is None else alternatives(unknown, names, otherwise="it takes no arguments")


class ProtocolReward(Evaluator):
    """Scores a play by what one agent earned; where it branched, by the value of its root."""

    def __init__(self, agent: str) -> None:
        self.agent = agent

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        """Score one episode. Raises RequestError when no protocol was played, or not with this agent."""
        tree = EpisodeTree.from_json(item.output_obj)
        endings = Counter(leaf.ending for leaf in tree.leaves())
        value, bounds = tree.value(None, self.agent), tree.bounds[self.agent]
        # Bounds that were worked out are those of the outcomes that were tried.
        return scored(item, (value, dict(endings)), bounds if within(value, bounds) else None)


_Width: TypeAlias = Annotated[int, Field(ge=1)]


class ProtocolWorkflowConfig(WorkflowConfig, name="protocol"):
    """Agents that play a protocol."""

    target_functions: ClassVar[tuple[str, ...]] = ("*",)

    protocol: str
    """`nip`, `adp`, `debate`, `merlin_arthur`, `mnip`, `solo_verifier`, or `module:name`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the protocol."""
    scenario: str
    """The task: a registered scenario, or `module:name`."""
    scenario_arguments: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the scenario."""
    policy: LlmRef | None = None
    """The model of agents that `policies` does not name; left out: the trained one."""
    policies: Annotated[dict[str, LlmRef], Refers("agents")] = Field(default_factory=dict)
    """The models of agents by name."""
    widths: _Width | list[_Width] | Annotated[dict[str, _Width | list[_Width]], Refers("agents")] = 1
    """Answers for each turn: a number, a list by round, or these by agent. 1 is a rollout."""
    retries: int = Field(default=RETRIES, ge=0)
    """How often a malformed answer is asked for again before it counts."""
    sampling: Annotated[dict[str, dict[str, Any]], Refers("agents")] = Field(default_factory=dict)
    """Sampling parameters by agent, such as `{prover: {max_tokens: 200}}`."""
    timeout: Annotated[float | None, CHANGEABLE] = Field(default=None, gt=0)
    """Seconds that a play may take."""

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
    models: dict[str, str | None] = dict.fromkeys(protocol.agents, config.policy)
    workflow = ProtocolWorkflow(
        protocol,
        find_scenario(config.scenario, config.scenario_arguments),
        models | config.policies if config.policies else config.policy,
        widths,
        retries=config.retries,
        sampling=config.sampling,
        seed=builder.config.finetuning.seed,
    )
    yield Workflow(protocol.name, workflow, config.timeout)


class ProtocolRewardConfig(EvaluatorConfig, name="protocol_reward"):
    """The sum of an agent's payoffs in the protocol."""

    agent: AgentRef
    """The agent, such as `verifier`."""


@register_evaluator(config_type=ProtocolRewardConfig)
async def protocol_reward(config: ProtocolRewardConfig, builder: Builder) -> AsyncIterator[ProtocolReward]:
    """The registered component `protocol_reward`."""
    yield ProtocolReward(config.agent)
