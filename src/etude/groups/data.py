"""From the episodes of a group's agents to the data of a job."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from etude.algorithms.episodes import ScoredEpisode, by_agent, is_play, tree_of
from etude.algorithms.expert_iteration import truth_of
from etude.algorithms.samples import Branch, branches_of, is_targeted, pair_of, same_prompt, sample_of
from etude.core.call import Call
from etude.core.data_model import number
from etude.core.edge import trajectory_of
from etude.core.episode import EpisodeRecord
from etude.core.errors import RequestError
from etude.core.trajectory import Trajectory

Rollouts = Mapping[str, Sequence[EpisodeRecord]]
"""Episodes by agent."""

_EVERY = ("*",)


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of one agent: a call of an episode."""

    episode: EpisodeRecord
    call: int
    """Index of the call within the episode."""

    @property
    def recorded(self) -> Call:
        """The call. Raises RequestError when the episode has no such call, or it was not answered."""
        recorded = next((call for call in self.episode.calls if call.index == self.call), None)
        if recorded is None or recorded.completion is None:
            raise RequestError(f"episode {self.episode.id!r} has no answered call {self.call}")
        return recorded


Steps = Mapping[str, Sequence[Step]]
"""Steps by agent."""


def supervised_data(rollouts: Rollouts, guess_replaced: Rollouts, model: str) -> list[list[Trajectory]]:
    """Samples to imitate: each agent's part of its rollouts, and of others with the truth for the decision.

    A rollout in which nobody decided has no guess to replace, and is left out. Raises RequestError for
    rollouts that are of other models.
    """
    groups = [
        [trajectory_of(sample) for sample in scored.samples()]
        for agent, episodes in rollouts.items()
        for scored in _parts(agent, episodes, model)
    ]
    for agent, episodes in guess_replaced.items():
        for scored in _parts(agent, episodes, model):
            truth = truth_of(scored)
            if truth is not None:
                groups.append([trajectory_of(truth)])
    return [group for group in groups if group]


def dpo_data(positive: Steps, negative: Steps, model: str) -> list[list[Trajectory]]:
    """A preference of each positive step over the negative one in its place; equal answers are left out.

    Raises RequestError for steps that do not belong together, or are of another model.
    """
    if positive.keys() != negative.keys():
        raise RequestError(
            f"positive steps are of {', '.join(positive) or 'nobody'}, and negative ones of "
            f"{', '.join(negative) or 'nobody'}"
        )
    groups = []
    for agent, chosen in positive.items():
        if len(chosen) != len(negative[agent]):
            raise RequestError(
                f"agent '{agent}' has {len(chosen)} positive and {len(negative[agent])} negative steps"
            )
        for step in (*chosen, *negative[agent]):
            _require_model(agent, [step.recorded], model)
        pairs = zip(chosen, negative[agent], strict=True)
        preferences = [_preference(agent, index, *pair) for index, pair in enumerate(pairs)]
        groups.append([item for item in preferences if item is not None])
    return [group for group in groups if group]


def grpo_data(rollouts: Rollouts, rewards: Mapping[str, float] | None, model: str) -> list[list[Trajectory]]:
    """Each agent's part of its rollouts, in groups by agent and example.

    `rewards` are by the ids of the episodes; None takes what the agent earned in the play. Raises
    RequestError for an episode without a reward, or of another model.
    """
    groups: dict[tuple[str, str], list[Trajectory]] = {}
    for agent, episodes in rollouts.items():
        for scored in _parts(agent, episodes, model):
            if rewards is None and not is_play(scored.episode):
                raise RequestError(f"episode {scored.episode.id!r} is no play; say its reward in 'rewards'")
            if rewards is not None and scored.episode.id not in rewards:
                raise RequestError(f"episode {scored.episode.id!r} has no reward")
            reward = scored.reward if rewards is None else _number(rewards, scored.episode.id)
            made = [trajectory_of(sample) for sample in replace(scored, reward=reward).samples()]
            groups.setdefault((agent, scored.episode.example.id), []).extend(made)
    return [group for group in groups.values() if group]


def _number(rewards: Mapping[str, float], episode: str) -> float:
    """The reward of an episode. Raises RequestError for one that is no finite number."""
    with contextlib.suppress(ValueError):
        if math.isfinite(value := number(rewards[episode])):
            return value
    raise RequestError(f"the reward of episode {episode!r} is {rewards[episode]!r}, and no finite number")


def _parts(agent: str, episodes: Sequence[EpisodeRecord], model: str) -> Iterator[ScoredEpisode]:
    """An agent's part of each episode; in a play with what it earned, elsewhere its calls and no reward.

    Raises RequestError when the agent's answers are of other models in all of the episodes.
    """
    parts: list[ScoredEpisode] = []
    answers: list[Call] = []
    for episode in episodes:
        branches = tuple(branches_of(episode, _EVERY, model))
        if is_play(episode):
            turns = {node.call for node in tree_of(episode).nodes if node.agent == agent}
            answers += [call for call in episode.calls if call.index in turns]
            groups = by_agent([ScoredEpisode(episode, 0.0, branches)])
            parts += [part for group in groups for part in group if part.agent == agent]
            continue
        functions = _functions(agent, episode.calls)
        answers += [call for call in episode.calls if is_targeted(call, functions, None)]
        parts.append(ScoredEpisode(episode, 0.0, tuple(branches_of(episode, functions, model)), None, agent))
    if answers:
        _require_model(agent, answers, model)
    yield from parts


def _require_model(agent: str, answers: Sequence[Call], model: str) -> None:
    """Raise RequestError unless one of an agent's answers is of the model."""
    models = list(dict.fromkeys(call.model for call in answers))
    if model not in models:
        raise RequestError(
            f"the group's line is of the model '{model}', and agent '{agent}' answered with "
            f"{', '.join(repr(other) for other in models)} in these episodes: `ModelLine` takes the name "
            "that calls are recorded under, the entry of `llms`"
        )


def _functions(agent: str, calls: Sequence[Call]) -> Collection[str]:
    """The function with the agent's name; where no call has it, all of them: it is the only agent."""
    return (agent,) if any(call.function == agent for call in calls) else _EVERY


def _preference(agent: str, index: int, chosen: Step, rejected: Step) -> Trajectory | None:
    better, worse = (
        sample_of(Branch(0, (step.recorded,)), step.episode, reward, agent=agent)
        for step, reward in ((chosen, 1.0), (rejected, 0.0))
    )
    for step in (chosen, rejected):
        if is_play(step.episode):
            names = {node.agent for node in tree_of(step.episode).nodes if node.call == step.call}
            if names != {agent}:
                raise RequestError(f"step {index} of '{agent}' is a turn of '{', '.join(names)}'")
    if not same_prompt(better, worse):
        raise RequestError(
            f"the positive and the negative step {index} of '{agent}' answer different prompts: "
            f"call {chosen.call} of {chosen.episode.id!r} and call {rejected.call} of {rejected.episode.id!r}"
        )
    episodes = {"chosen_episode": chosen.episode.id, "rejected_episode": rejected.episode.id}
    pair = pair_of(better, worse, agent=agent, **episodes)
    return None if pair is None else trajectory_of(pair)
