"""Plays of protocols among the episodes: whose call is whose, and what it was worth to them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from etude.algorithms.branches import Branch, branches_of, is_targeted
from etude.algorithms.scored import Group, ScoredEpisode
from etude.core.call import Call
from etude.core.episode import EpisodeRecord
from etude.core.errors import RequestError
from etude.protocols.tree import EpisodeTree, Node
from etude.rewards.shaping import discounted_returns


def is_play(episode: EpisodeRecord) -> bool:
    """Whether a protocol was played in the episode."""
    output = episode.output
    return isinstance(output, Mapping) and {"protocol", "nodes", "bounds"} <= output.keys()


def tree_of(episode: EpisodeRecord) -> EpisodeTree:
    """The episode's tree. Raises RequestError when no protocol was played in it."""
    try:
        return EpisodeTree.from_json(episode.output)
    except RequestError as error:
        raise RequestError(f"episode {episode.id!r}: {error}") from None


def without_retries(episode: EpisodeRecord) -> EpisodeRecord:
    """The episode without the answers that could not be used and were asked for again."""
    if not is_play(episode):
        return episode
    retried = {one.call for node in tree_of(episode).nodes for one in node.rejected}
    kept = tuple(call for call in episode.calls if call.index not in retried)
    return replace(episode, calls=kept) if len(kept) < len(episode.calls) else episode


def agents_of(
    tree: EpisodeTree, calls: Sequence[Call], functions: Collection[str], model: str | None
) -> list[str]:
    """The agents whose answers are by the targeted functions and model, in the order of the protocol."""
    targeted = {call.index for call in calls if is_targeted(call, functions, model)}
    found = {node.agent for node in tree.nodes if node.call in targeted}
    return [agent for agent in tree.agents if agent in found]


def by_agent(group: Group, functions: Collection[str], model: str | None) -> list[list[ScoredEpisode]]:
    """A group for each agent: its own part of each episode, with what it earned itself for the reward.

    Raises RequestError for an episode in which no protocol was played.
    """
    groups: dict[str, list[ScoredEpisode]] = {}
    for scored in group:
        episode, tree = scored.episode, tree_of(scored.episode)
        for agent in agents_of(tree, episode.calls, functions, model):
            own = {node.call for node in tree.nodes if node.agent == agent}
            calls = tuple(call for call in episode.calls if call.index in own)
            branches = tuple(branches_of(replace(episode, calls=calls), functions, model))
            part = ScoredEpisode(episode, tree.value(None, agent), branches, scored.reasoning, agent)
            groups.setdefault(agent, []).append(part)
    return list(groups.values())


def turn_returns(branch: Branch, tree: EpisodeTree, agent: str, discount: float) -> list[float] | None:
    """What an agent earned from each call of a branch on; None where the play goes several ways.

    What it earned before its first answer is no merit of any answer.
    """
    leaves = list(tree.leaves())
    if len(leaves) != 1:
        return None
    path = tree.path(leaves[0])
    own = {call.index: place for place, call in enumerate(branch.calls)}
    steps, turn = [0.0] * len(branch.calls), None
    for nodes in _by_round(path):
        turn = next((own[node.call] for node in nodes if node.call in own), turn)
        if turn is not None:
            steps[turn] += sum(node.rewards.get(agent, 0.0) for node in nodes)
    return discounted_returns(steps, discount)


def _by_round(path: Sequence[Node]) -> Iterator[list[Node]]:
    for number in sorted({node.round for node in path}):
        yield [node for node in path if node.round == number]
