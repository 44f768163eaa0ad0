"""The workflow that plays a protocol, the lookup of protocols and scenarios by name, and their components."""

import math
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import Field

from etude.config.builder import Builder
from etude.config.component import AgentRef, EvaluatorConfig, LlmRef, ReferenceTo, WorkflowConfig
from etude.config.import_path import import_object, is_import_path, user_code
from etude.config.registry import config_factory, register_evaluator, register_workflow
from etude.core.call import Sampling
from etude.core.episode import Example
from etude.core.errors import EpisodeError, RequestError, alternatives
from etude.core.evaluation import EvalInputItem, EvalOutputItem
from etude.core.interfaces import Engine, Evaluator
from etude.core.keys import fold
from etude.protocols.branching import FinalAnswer, Play, Question, Widths, check_widths, most_calls
from etude.protocols.catalog import PROTOCOLS
from etude.protocols.protocol import Protocol, Turn
from etude.protocols.scenario import Malformed, Move, Scenario
from etude.protocols.tree import EpisodeTree, Node, Rejected, sign
from etude.rollout.collector import Collector, EpisodeJob, Limits
from etude.rollout.episode import Episode
from etude.rollout.evaluator import make_score
from etude.rollout.recorder import Reply
from etude.rollout.tools import gather_results
from etude.rollout.workflow import Workflow, as_workflow
from etude.store.journal import Journal

RETRIES = 3
"""The default number of retries for a malformed answer."""


@dataclass(frozen=True, repr=False)
class ProtocolWorkflow:
    """A workflow that plays a protocol on an example; its output is the episode tree as JSON.

    Each agent's calls are recorded under the function with the agent's name. Raises RequestError for agents
    that the protocol does not have, and for invalid policies, widths or retries.
    """

    protocol: Protocol
    scenario: Scenario
    policies: Mapping[str, str | None] | None = None
    """The entry of `llms` that each agent samples from. None: all sample from the default model."""
    widths: Widths = 1
    """The number of answers sampled for each turn."""
    retries: int = RETRIES
    """The number of times that the model is asked again after a malformed answer."""
    seed: int = 0
    """The seed for a play's draws: the schedule, the stance and the order of channels."""

    def __post_init__(self) -> None:
        agents, scenario = self.protocol.agents, self.scenario
        if isinstance(scenario, type):
            raise RequestError(f"the scenario is a class; give an object of it: {scenario.__name__}(…)")
        lacking = [method for method in _METHODS if not callable(getattr(scenario, method, None))]
        if lacking:
            text = f"the scenario {scenario!r:.80} has no method '{lacking[0]}'; it needs "
            raise RequestError(text + ", ".join(_METHODS))
        check_widths(self.widths, agents)
        for agent in self.policies or ():
            if agent not in agents:
                where = f"policies: protocol '{self.protocol.name}' has no agent '{agent}'"
                raise RequestError(where + alternatives(agent, agents))
        missing = [agent for agent, model in self.models.items() if model is None]
        if missing and self.policies is not None:
            raise RequestError(f"policies: the agent '{missing[0]}' has no model; name an entry of `llms`")
        if self.retries < 0:
            raise RequestError(f"retries must be at least 0, found {self.retries}")

    async def __call__(self, example: Example, episode: Episode) -> Any:
        """Play once. Raises as `Play` does, and RequestError if `episode.widths` names unknown agents."""
        widths: Widths = self.widths if episode.widths is None else episode.widths
        check_widths(widths, self.protocol.agents)
        # All episodes of an example play the same schedule, so that they can be compared.
        group = episode.id.removesuffix(f"/{episode.generation}")
        key = fold(self.seed, group, "play")
        play = Play(self.protocol, self.scenario, example, _Asker(self, episode).ask, key, widths)
        return (await play.grow()).to_json()

    def __repr__(self) -> str:
        return f"<protocol {self.protocol.name}>"

    @property
    def models(self) -> dict[str, str | None]:
        """The entry of `llms` that each agent samples from; None for the default model."""
        return {agent: (self.policies or {}).get(agent) for agent in self.protocol.agents}


async def play(
    protocol: Protocol,
    scenario: Scenario,
    policies: Mapping[str, Engine],
    example: Example,
    *,
    widths: Widths = 1,
    retries: int = RETRIES,
    seed: int = 0,
) -> EpisodeTree:
    """Play a protocol on one example, each agent with its engine. Nothing is stored.

    Width 1 is a rollout. Width k branches at every turn, and `[k, 1]` in the first round only. A mapping
    gives widths by agent. For many examples, or to resume, hand a `ProtocolWorkflow` to a `Collector`.
    Raises RequestError for arguments that do not fit the protocol, EpisodeError when the play failed.
    """
    names = {agent: agent for agent in policies}
    workflow = as_workflow(ProtocolWorkflow(protocol, scenario, names, widths, retries, seed))
    limits = Limits(max_concurrency=1, timeout=None, max_calls=None)
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "play.db") as journal:
        models = {agent: Sampling() for agent in policies}
        collector = Collector(workflow, policies, journal, seed=seed, limits=limits, sampling=models)
        record = await collector.run(EpisodeJob(f"play/{example.id}/0", example))
    if record.failure is not None:
        raise EpisodeError(f"the play on example '{example.id}' failed: {record.failure.reason}")
    return EpisodeTree.from_json(record.output)


@dataclass(eq=False)
class _Asker:
    """The source of answers from the agents' models, which makes all model calls of one episode."""

    workflow: ProtocolWorkflow
    episode: Episode
    calls: int = 0

    async def ask(self, questions: Sequence[Question]) -> list[FinalAnswer]:
        """Ask all questions at the same time, and return their answers.

        Malformed answers are retried together, after all answers have arrived. So the order of the calls
        depends on the answers alone. Raises the errors of `Episode.chat` after every call has ended, and
        EpisodeError for an act that the turn does not allow.
        """
        answers: dict[int, FinalAnswer] = {}
        rejected: dict[int, tuple[Rejected, ...]] = {}
        for retries_left in range(self.workflow.retries, -1, -1):
            waiting = [index for index in range(len(questions)) if index not in answers]
            replies = await gather_results(self._chat(questions[index]) for index in waiting)
            for index, (call, reply) in zip(waiting, replies, strict=True):
                act = self._parse_answer(reply.text, questions[index].turn)
                before = rejected.get(index, ())
                if isinstance(act, Malformed) and retries_left:
                    rejected[index] = (*before, Rejected(call, act.reason))
                else:
                    cut_off = reply.finish_reason == "length"
                    answers[index] = FinalAnswer(call, reply.text, act, cut_off, before)
        return [answers[index] for index in range(len(questions))]

    async def _chat(self, question: Question) -> tuple[int, Reply]:
        agent = question.turn.agent
        # Nothing is awaited before the recorder counts this call, so both counts stay equal.
        call = self.calls
        self.calls += 1
        with self.episode.function(agent):
            return call, await self.episode.chat(question.prompt, model=self.workflow.models[agent])

    def _parse_answer(self, text: str, turn: Turn) -> Move | Malformed:
        act = self.workflow.scenario.parse(text, turn)
        if isinstance(act, Malformed):
            return act
        if not isinstance(act, Move):
            raise EpisodeError(f"the scenario's parse returned {act!r:.80}; return a Move or Malformed")
        stray = [channel for channel in act.messages if channel not in turn.writes]
        if stray:
            raise EpisodeError(f"the scenario's parse makes '{turn.agent}' write on '{stray[0]}' out of turn")
        if act.decision is None:
            return Malformed("no decision in a turn that must decide") if turn.decide == "must" else act
        if turn.decide == "no":
            return Malformed("a decision in a turn that may not decide")
        if not -1 <= act.decision <= 1:
            raise EpisodeError(f"the scenario's parse returned the decision {act.decision}, outside [-1, 1]")
        return act


_METHODS = ("render", "parse", "truth", "stance")
SCENARIOS = {"code_validation": "etude.protocols.code_validation:CodeValidation"}
"""The built-in scenarios, by name."""


def find_protocol(name: str, arguments: Mapping[str, Any]) -> Protocol:
    """Return the protocol with a name or import path. The path names a Protocol or a function that makes one.

    Raises RequestError for an unknown name and for arguments that do not fit.
    """
    protocol = _make("protocol", name, PROTOCOLS, arguments)
    if not isinstance(protocol, Protocol):
        raise RequestError(f"protocol '{name}': expected an etude.protocols.Protocol, found {protocol!r:.80}")
    return protocol


def _make(kind: str, name: str, known: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    factory: Any = import_object(name) if is_import_path(name) else known.get(name)
    if factory is None:
        raise RequestError(
            f"there is no {kind} '{name}'" + alternatives(name, known) + ", or name your own as module:name"
        )
    if isinstance(factory, Protocol) or (not isinstance(factory, type) and hasattr(factory, "render")):
        if arguments:
            raise RequestError(f"'{name}' is not a function and takes no arguments: {', '.join(arguments)}")
        return factory
    with user_code(RequestError, f"'{name}' cannot be made with {dict(arguments)}"):
        return factory(**arguments)


@dataclass(eq=False)
class ProtocolReward(Evaluator):
    """The evaluator for an agent's total reward in a play, or the root's value if the play branched."""

    agent: str

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        """Score one episode. Raises RequestError if it did not play a protocol with this agent."""
        tree = EpisodeTree.from_json(item.output_obj)
        endings = Counter(leaf.ending for leaf in tree.leaves())
        return make_score(item, (tree.value(None, self.agent), dict(endings)), tree.bounds.get(self.agent))


_Width: TypeAlias = Annotated[int, Field(ge=1)]


class ProtocolWorkflowConfig(WorkflowConfig, name="protocol"):
    """Agents that play a protocol."""

    target_functions: ClassVar[tuple[str, ...]] = ("*",)

    protocol: str
    """`nip`, `adp`, `debate`, `merlin_arthur`, `mnip`, `solo_verifier`, or your own `module:name`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the protocol."""
    scenario: str
    """The task: `code_validation`, or your own `module:name`."""
    scenario_arguments: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the scenario."""
    policy: LlmRef | None = None
    """The model of agents that `policies` does not name. Default: the trained model, if it names none."""
    policies: Annotated[dict[str, LlmRef], ReferenceTo("agents")] = Field(default_factory=dict)
    """The model of each agent, by the agent's name."""
    widths: _Width | list[_Width] | Annotated[dict[str, _Width | list[_Width]], ReferenceTo("agents")] = 1
    """Answers sampled for each turn: a number, a list by round, or either by agent. 1 is a plain rollout."""
    retries: int = Field(default=RETRIES, ge=0)
    """How often to ask again after a malformed answer."""

    def agents(self) -> Mapping[str, str | None]:
        """Return the protocol's agents with their models. Raises RequestError when it cannot be made."""
        protocol = find_protocol(self.protocol, self.arguments)
        return {agent: self.policies.get(agent, self.policy) for agent in protocol.agents}


@register_workflow(config_type=ProtocolWorkflowConfig)
async def protocol_workflow(config: ProtocolWorkflowConfig, builder: Builder) -> AsyncIterator[Workflow]:
    """Build the workflow. Raises RequestError for unfit settings, and for more calls than `max_calls`.

    A scenario's import path names a scenario, its class, or a function that makes one.
    """
    protocol = find_protocol(config.protocol, config.arguments)
    path = SCENARIOS.get(config.scenario, config.scenario)
    scenario: Scenario = _make("scenario", path, SCENARIOS, config.scenario_arguments)
    calls, most = most_calls(protocol, config.widths), builder.config.eval.general.max_calls
    if most is not None and calls > most:
        raise RequestError(
            f"a play of '{protocol.name}' with these widths can take {calls} calls, and "
            f"eval.general.max_calls is {most}; choose smaller widths or fewer rounds, or raise the limit"
        )
    models: dict[str, str | None] = dict.fromkeys(protocol.agents, config.policy)
    workflow = ProtocolWorkflow(
        protocol,
        scenario,
        models | config.policies if config.policies or config.policy else None,
        config.widths,
        retries=config.retries,
        seed=builder.config.finetuning.seed,
    )
    yield Workflow(protocol.name, workflow)


class ProtocolRewardConfig(EvaluatorConfig, name="protocol_reward"):
    """The total reward of an agent: the sum of its payoffs in the protocol."""

    agent: AgentRef
    """The agent, such as `verifier`."""


register_evaluator(config_type=ProtocolRewardConfig)(
    config_factory(lambda config: ProtocolReward(config.agent))
)


def accuracy(tree: EpisodeTree) -> float:
    """Return the probability of the right verdict. A play without a decision counts as wrong.

    Each of the k answers to a turn that was sampled k times has probability 1 / k.
    """

    def right(node: Node | None) -> float:
        if children := tree.children(node):
            return math.fsum(map(right, children)) / len(children)
        return float(node is not None and (node.verdict or 0.0) * sign(tree.truth) > 0)

    return right(None)


class VerdictAccuracy(Evaluator):
    """The evaluator for the probability of the right verdict."""

    bounds = (0.0, 1.0)

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        """Score one episode. Raises RequestError if it played no protocol."""
        return make_score(item, accuracy(EpisodeTree.from_json(item.output_obj)))


class VerdictAccuracyConfig(EvaluatorConfig, name="verdict_accuracy"):
    """The accuracy of the verdict: 1 if it is right, 0 if it is wrong or missing."""


register_evaluator(config_type=VerdictAccuracyConfig)(config_factory(lambda config: VerdictAccuracy()))
