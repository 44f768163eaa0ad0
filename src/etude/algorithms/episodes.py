"""Scored episodes, as algorithms use them, and in plays each agent's calls and earnings."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any, TypeAlias

from etude.algorithms.samples import (
    CUT_OFF,
    count_cut_off,
    discounted_returns,
    find_branches,
    make_sample,
    mask_cut_off,
    step_returns,
)
from etude.core.call import Call
from etude.core.episode import EpisodeRecord, recorded_score
from etude.core.errors import RequestError
from etude.core.message import message_key
from etude.core.sample import Kind, Pair, Sample, SampleOrPair
from etude.protocols.tree import EpisodeTree

REWARD = "reward"
"""The measured score of an agent that `credit` uses."""

IDLE = "group without an advantage, and no other term of the loss that moves the policy"
UNMEASURED = "agent without a measured reward"
BRANCHED = "answer in a play that branches (`credit: turn` compares plays that do not)"


@dataclass(frozen=True, slots=True)
class ScoredEpisode:
    """An episode with its reward and the calls to train on."""

    episode: EpisodeRecord
    reward: float
    calls: Sequence[Call]
    """Answered calls, in order."""
    reasoning: Any = None
    agent: str | None = None
    """The agent that reward and calls belong to, if an episode's agents are distinguished."""
    penalty: float = 0.0
    """The penalty per cut-off answer; `reward` already has it subtracted."""

    def samples(self, discount: float = 1.0, returns: Mapping[int, float] | None = None) -> list[Sample]:
        """Return the samples of its calls. Turns have `returns`, by the calls' indices. By default they have
        the step rewards' discounted returns, if the agent gave any."""
        courses: dict[frozenset[str | None], Mapping[int, float] | None] = {}
        made: list[Sample] = []
        for branch, (calls, fault) in enumerate(find_branches(self.calls)):
            own = frozenset((None, *(call.function for call in calls)))
            if returns is None and own not in courses:
                course = [call for call in self.calls if call.function in own]
                events = [event for event in self.episode.events if event.agent in own]
                courses[own] = step_returns(course, events, self.reward, discount)
            made.append(
                make_sample(
                    calls,
                    self.episode,
                    self.reward,
                    branch=branch,
                    returns=courses[own] if returns is None else returns,
                    agent=self.agent,
                    drifted=bool(fault),
                    reasoning=self.reasoning,
                )
            )
        return made


Group = Sequence[ScoredEpisode]
"""The scored episodes of one example."""


@dataclass(frozen=True, slots=True)
class UnitGroup:
    """The outcome of a group of episodes: samples to compare with each other, or pairs."""

    units: Sequence[SampleOrPair]
    rewards: Sequence[float] | None = None
    """The rewards of all the group's episodes, even of those without units. None: use the units' rewards."""

    @property
    def samples(self) -> list[Sample]:
        """The units that are not pairs."""
        return [unit for unit in self.units if isinstance(unit, Sample)]

    @classmethod
    def of_pairs(cls, pairs: Sequence[Pair]) -> UnitGroup:
        """Return pairs of answers, judged by the values of all their sides."""
        return cls(pairs, [sample.reward for pair in pairs for sample in pair.samples])


@dataclass(slots=True)
class Tally:
    """One epoch's counts that the run itself does not keep."""

    episodes: int = 0
    rewards: list[float] = field(default_factory=list)
    """The rewards of every scored episode, trained on or not."""
    unscored: int = 0
    """Episodes without a reward."""
    untargeted: int = 0
    """Scored episodes without a call to the target functions and model."""
    branches: int = 0
    drift: Counter[str] = field(default_factory=Counter)
    """Branches that began because a prompt repeated a conversation in other tokens, by what the template
    wrote differently: a message's role and kind, or the tools."""
    retried: int = 0
    """Unusable answers in a protocol that were asked for again. They are not trained on."""
    replacements: int = 0
    """Examples played to replace others in which no episode had an advantage."""
    left_out: Counter[str] = field(default_factory=Counter)
    """The counts of everything that the algorithm left out, by reason."""
    reward_groups: dict[str, int] = field(default_factory=dict)
    """Groups with several rewards (`compared`), and how many of them have no advantage (`flat`)."""

    def leave_out(self, reason: str, count: int) -> None:
        """Count what an algorithm leaves out. A reason with a count of 0 is not kept."""
        if count:
            self.left_out[reason] += count

    def facts(self) -> dict[str, Any]:
        """Return the counts as JSON."""
        counts = {"drift": dict(self.drift), "left_out": dict(self.left_out), "drifted": self.drift.total()}
        return asdict(self) | counts


def reward_groups(groups: Iterable[UnitGroup], compared: Iterable[bool]) -> dict[str, int]:
    """Return the number of groups with several rewards (`compared`), and of the `flat` ones among them."""
    several = [differ for group, differ in zip(groups, compared, strict=True) if len(group.rewards or ()) > 1]
    return {"compared": len(several), "flat": several.count(False)}


def without_cut_off(group: UnitGroup, kind: Kind, tally: Tally) -> UnitGroup:
    """Return the group with cut-off answers masked out of its loss."""
    made = [mask_cut_off(unit, kind) for unit in group.units]
    tally.leave_out(CUT_OFF, made.count(None))
    return replace(group, units=[unit for unit in made if unit is not None])


def list_rewards(group: Group) -> list[float]:
    """Return the rewards of a group's episodes."""
    return [scored.reward for scored in group]


def is_play(episode: EpisodeRecord) -> bool:
    """Return whether the episode played a protocol."""
    output = episode.output
    return isinstance(output, Mapping) and {"protocol", "nodes", "bounds"} <= output.keys()


def read_tree(episode: EpisodeRecord) -> EpisodeTree:
    """Return the episode's tree. Raises RequestError if it played no protocol."""
    try:
        return EpisodeTree.from_json(episode.output)
    except RequestError as error:
        raise RequestError(f"episode {episode.id!r}: {error}") from None


def without_retries(episode: EpisodeRecord) -> EpisodeRecord:
    """Return the episode without unusable answers that were asked for again."""
    if not is_play(episode):
        return episode
    retried = {answer.call for node in read_tree(episode).nodes for answer in node.rejected}
    kept = tuple(call for call in episode.calls if call.index not in retried)
    return replace(episode, calls=kept) if len(kept) < len(episode.calls) else episode


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
