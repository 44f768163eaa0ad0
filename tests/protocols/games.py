"""A small scenario, and engines that play it from a script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from etude.core.call import ChatRequest
from etude.core.episode import EpisodeRecord, Example
from etude.core.interfaces import Engine
from etude.core.keys import generator
from etude.core.message import Message
from etude.protocols import EpisodeTree, Log, Protocol, ProtocolWorkflow, Scenario, Turn, Verdict, dialogue
from etude.protocols.tree import Node
from etude.rollout.collector import Collector, EpisodeJob, Limits
from etude.rollout.workflow import as_workflow
from etude.store.journal import Journal
from tests.support import ScriptedEngine


class Labelled(Scenario):
    """Examples that say what is right; the prompt is little more than the dialogue."""

    def render(self, example: Example, log: Log, agent: str, turn: Turn) -> list[Message]:
        return dialogue(log, agent, f"You are {agent}. {example.id}", last_words="Decide now.")

    def truth(self, example: Example) -> Verdict:
        return example.inputs["label"]

    def stance(self, example: Example) -> Verdict:
        return example.inputs.get("stance", 1)


def example(label: Any = 1, **inputs: Any) -> Example:
    return Example("e", {"label": label, **inputs})


def find_agent(request: ChatRequest) -> str:
    """Whose prompt it is."""
    return str(request.messages[0]["content"]).removeprefix("You are ").partition(".")[0]


def count_turns(request: ChatRequest) -> int:
    """Which of its own turns the agent is in, from 0."""
    return sum(message["role"] == "assistant" for message in request.messages)


def script(**lines: Sequence[str]) -> ScriptedEngine:
    """Each agent says its lines in turn, the last one again and again."""

    def answer(request: ChatRequest) -> str:
        own = lines[find_agent(request)]
        return own[min(count_turns(request), len(own) - 1)]

    return ScriptedEngine(answer)


def chance(request: ChatRequest) -> str:
    """A message or, from the verifier now and then, a decision; sometimes neither. By the request's key."""
    random = generator(request.key, "answer")
    if find_agent(request) == "verifier":
        drawn = random.random()
        if drawn < 0.4 or (drawn < 0.9 and "Decide now." in request.messages[-1]["content"]):
            return f"Decision: {random.choice(['accept', 'reject'])}"
        number = random.randrange(3)
        return f"Question for Expert_1: what {number}?\nQuestion for Expert_2: why {number}?"
    return random.choice(["", "yes", "no", "Decision: accept"])


class ChanceEngine(ScriptedEngine):
    """Plays `chance`, and answers in an order of its own."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(chance, slowly=True, **settings)


async def play_record(
    protocol: Protocol,
    engine: Engine | Mapping[str, Engine],
    journal: Journal,
    *,
    about: Example | None = None,
    scenario: Scenario | None = None,
    id: str = "train/1/e/0",
    generation: int = 0,
    seed: int = 0,
    **settings: Any,
) -> EpisodeRecord:
    """The episode of one play, through the ordinary collector."""
    models = engine if isinstance(engine, Mapping) else {"policy": engine}
    workflow = ProtocolWorkflow(protocol, scenario or Labelled(), **settings)
    limits = Limits(max_calls=None)
    collector = Collector(as_workflow(workflow), models, journal, seed=seed, limits=limits)
    return await collector.run(EpisodeJob(id, about or example(), generation))


async def play_tree(protocol: Protocol, engine: Engine, journal: Journal, **settings: Any) -> EpisodeTree:
    """The tree of one play."""
    record = await play_record(protocol, engine, journal, **settings)
    assert record.failure is None, record.failure
    return EpisodeTree.from_json(record.output)


def shape(tree: EpisodeTree) -> list[tuple[int, str, str]]:
    """Round, agent and text of the only path of a tree."""
    assert len(list(tree.leaves())) == 1
    return [(node.round, node.agent, node.text) for node in tree.nodes]


def expected_value(tree: EpisodeTree, node: Node | None, agent: str) -> float:
    """The agent's mean payoff from a node, or the start, by the probability of each way to the end."""
    start = None if node is None else node.id
    ways = [(1.0, start, 0.0 if node is None else node.rewards.get(agent, 0.0))]
    ended = 0.0
    while ways:
        probability, place, earned = ways.pop()
        children = [one for one in tree.nodes if one.parent == place]
        ended += 0.0 if children else probability * earned
        ways += [
            (probability / len(children), child.id, earned + child.rewards.get(agent, 0.0))
            for child in children
        ]
    return ended
