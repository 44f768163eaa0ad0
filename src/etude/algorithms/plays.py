"""Plays of a protocol, and other episodes of several agents: each agent's calls, earnings and choices."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, TypeAlias

from etude.algorithms.samples import (
    Group,
    ScoredEpisode,
    Tally,
    count_cut_off,
    discounted_returns,
    is_play,
    make_sample,
    read_tree,
)
from etude.core.call import Call
from etude.core.episode import recorded_score
from etude.core.errors import RequestError
from etude.core.message import message_key
from etude.core.sample import Sample
from etude.protocols.tree import EpisodeTree

REWARD = "reward"
"""The measured score of an agent that `credit` uses."""

UNMEASURED = "agent without a measured reward"
BRANCHED = "answer in a play that branches (`credit: turn` compares plays that do not)"


def by_agent(group: Group, tally: Tally | None = None) -> list[list[ScoredEpisode]]:
    """Return a group for each agent: its part of each episode, with its own earnings as the reward.

    In a play these are its payoffs. Elsewhere an agent's calls are the calls of the function with its name,
    and its earnings are its measured score "reward". An agent without that score is left out and counted.
    Raises RequestError if the episodes have neither.
    """
    groups: dict[str, list[ScoredEpisode]] = defaultdict(list)
    is_measured = any(
        event.kind == "score" and event.agent is not None for each in group for event in each.episode.events
    )
    for scored in group:
        if not is_measured and not is_play(scored.episode):
            raise RequestError(
                f"episode {scored.episode.id!r}: `credit` goes by what each agent earned, and none did. Play "
                f"a protocol, or record it: `episode.score('{REWARD}', value, agent='name')`"
            )
        for agent, calls, reward in _parts(scored):
            if reward is not None:
                price = scored.penalty * count_cut_off(calls)
                groups[agent].append(replace(scored, calls=calls, agent=agent, reward=reward - price))
            elif tally is not None:
                tally.leave_out(UNMEASURED, 1)
    return list(groups.values())


def _parts(scored: ScoredEpisode) -> Iterator[tuple[str, list[Call], float | None]]:
    """Yield each agent with its calls and its earnings."""
    if not is_play(scored.episode):
        for agent in dict.fromkeys(call.function for call in scored.calls):
            event = recorded_score(scored.episode, REWARD, agent)
            calls = [call for call in scored.calls if call.function == agent]
            yield agent, calls, None if event is None else event.value
        return
    tree = read_tree(scored.episode)
    for agent in tree.agents:
        own = {node.call for node in tree.nodes if node.agent == agent}
        if calls := [call for call in scored.calls if call.index in own]:
            yield agent, calls, tree.value(None, agent)


def turn_returns(
    calls: Sequence[Call], tree: EpisodeTree, agent: str, discount: float, penalty: float = 0.0
) -> dict[int, float] | None:
    """Return an agent's earnings from each of its calls on, by the call's index, minus a penalty for each
    cut-off answer.

    None if the play branches. Earnings before the agent's first answer count for no answer.
    """
    leaves = list(tree.leaves())
    if len(leaves) != 1:
        return None
    steps = {call.index: -penalty * count_cut_off([call]) for call in calls}
    turn: int | None = None
    for _, round_ in groupby(tree.path(leaves[0]), key=lambda node: node.round):
        nodes = list(round_)
        turn = next((node.call for node in nodes if node.call in steps), turn)
        if turn is not None:
            steps[turn] += sum(node.rewards.get(agent, 0.0) for node in nodes)
    return discounted_returns(calls, steps, discount)


Choice: TypeAlias = tuple[list[Sample], tuple[float, float] | None]
"""Several answers to one prompt of an episode, each with its worth to its agent as the reward; and the least
and most that the agent can earn in the play, if the protocol says so."""


def find_choices(scored: ScoredEpisode) -> Iterator[Choice]:
    """Yield the prompts of an episode with several answers.

    In a protocol these are the choices of the episode's agent, and an answer's value is its nodes' value.
    Elsewhere they are calls with equal prompts, valued by the step reward after the call. A call without a
    step reward is no answer to compare.
    """
    values = defaultdict[int, list[float]](list)
    prompts: list[tuple[Iterable[int], tuple[float, float] | None]] = []
    if is_play(scored.episode):
        tree = read_tree(scored.episode)
        for agent, answers in tree.answers(scored.agent):
            worth = tree.values(agent)
            for index, copies in answers.items():
                values[index] = [math.fsum(worth[node.id] for node in copies) / len(copies)]
            prompts.append((answers, tree.bounds.get(agent)))
    else:
        for event in scored.episode.events:
            before = (call for call in reversed(scored.calls) if call.index <= event.after_call)
            own = next((call for call in before if event.agent in (None, call.function)), None)
            if event.kind == "step_reward" and event.value is not None and own is not None:
                values[own.index].append(event.value)
        equal = defaultdict[Any, list[int]](list)
        for call in (call for call in scored.calls if call.index in values):
            tokens = None if call.completion is None else call.completion.prompt_ids
            prompt: Any = tokens or tuple(map(message_key, call.request.messages))
            equal[prompt].append(call.index)
        prompts += [(indices, None) for indices in equal.values()]
    calls = {call.index: call for call in scored.calls}
    for indices, bounds in prompts:
        samples = []
        for call in (calls[index] for index in indices if index in calls):
            reward = math.fsum(values[call.index]) - scored.penalty * count_cut_off([call])
            samples.append(make_sample([call], scored.episode, reward, agent=scored.agent))
        if len(samples) > 1:
            yield samples, bounds


def answers_of_group(group: Group, discount: float, tally: Tally) -> list[Sample]:
    """Return one agent's answers in a group's episodes, each with the earnings from it on. A play that
    branches is left out."""
    samples: list[Sample] = []
    for scored in group:
        if not is_play(scored.episode):
            samples += scored.samples(discount)
            continue
        tree, agent = read_tree(scored.episode), str(scored.agent)
        returns = turn_returns(scored.calls, tree, agent, discount, scored.penalty)
        if returns is None:
            tally.leave_out(BRANCHED, len(scored.calls))
        else:
            samples += scored.samples(returns=returns)
    return samples
