"""The agents of a group: the settings that they share, and a job's training data from their episodes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from pydantic import ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass as checked_dataclass

from etude.algorithms.imitation import true_decision
from etude.algorithms.plays import by_agent
from etude.algorithms.samples import (
    ScoredEpisode,
    is_play,
    make_pair,
    make_sample,
    read_tree,
    same_prompt,
    targeted_calls,
)
from etude.backends.trainer_adapter import JobHyperparameters
from etude.core.call import Call
from etude.core.data_model import list_faults
from etude.core.episode import EpisodeRecord
from etude.core.errors import RequestError
from etude.core.sample import Pair, Sample
from etude.protocols.protocol import Protocol

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@checked_dataclass(frozen=True, slots=True, config=_STRICT)
class ModelSettings:
    """The model and training settings that the agents of a group share.

    Raises RequestError for an invalid value.
    """

    model_name: str
    """The name of the base model at its backend or in `llms`."""
    freeze_agent: bool = False
    """Never train the model."""
    fine_tune_from_scratch: bool = False
    """Start each job from the base model."""
    dry_run: bool = False
    """Build data sets, but submit no jobs."""
    min_rows: int = Field(default=1, ge=1)
    """The minimum number of rows to train on."""
    num_epochs: int | None = Field(default=None, ge=1)
    """Passes of a job over its data. None takes the value of the adapter's config."""
    rl_learning_rate: float | None = Field(default=None, gt=0)
    """The learning rate of `dpo` and `grpo`. None takes the value of the adapter's config."""
    dpo_beta: float | None = Field(default=None, gt=0)
    """How hard preferences pull away from the reference. None takes the value of the adapter's config."""
    lora_rank: int | None = Field(default=None, ge=0)
    """The rank of the LoRA weights; 0 trains all weights. None takes the value of the adapter's config."""
    lora_alpha_scale: float = Field(default=1.0, gt=0)
    """LoRA's alpha as a multiple of `lora_rank`."""

    @model_validator(mode="wrap")
    @classmethod
    def _check_all(cls, values: Any, make: Callable[[Any], Self]) -> Self:
        try:
            return make(values)
        except ValidationError as error:
            raise RequestError(list_faults(error)) from error

    def __post_init__(self) -> None:
        if self.lora_alpha_scale != 1.0 and not self.lora_rank:
            raise RequestError("lora_alpha_scale is a multiple of lora_rank: set that too")

    @property
    def lora_alpha(self) -> float | None:
        """LoRA's alpha; None when all weights are trained, or when the adapter's config decides."""
        return round(self.lora_rank * self.lora_alpha_scale, 6) if self.lora_rank else None

    @property
    def hyperparameters(self) -> JobHyperparameters:
        """The settings that are sent with a job."""
        return JobHyperparameters(
            self.num_epochs, self.rl_learning_rate, self.dpo_beta, self.lora_rank, self.lora_alpha
        )


@dataclass(frozen=True, slots=True)
class GroupAgent:
    """An agent with a model that it may share with others."""

    agent_name: str
    settings: ModelSettings
    shared_model_group: str | None = None
    """The name of its group; None for a separate group with the agent's name."""
    may_decide: bool = False
    """Whether the agent is a verifier, whose guesses can be replaced by the truth."""


def agents_of_model(
    protocol: Protocol, policies: Mapping[str, str], model: str, group: str, settings: ModelSettings
) -> list[GroupAgent]:
    """Return the agents of a protocol whose policy is `model`, as agents of the group."""
    return [
        GroupAgent(agent, settings, group, role.may_decide)
        for agent, role in protocol.agents.items()
        if policies.get(agent) == model
    ]


Rollouts = Mapping[str, Sequence[EpisodeRecord]]
"""Episodes by agent."""

_EVERY = ("*",)
_FINITE = TypeAdapter[float](FiniteFloat)


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of one agent: a call of an episode."""

    episode: EpisodeRecord
    call: int
    """The index of the call in the episode."""

    @property
    def recorded_call(self) -> Call:
        """The recorded call. Raises RequestError if it is missing or was not answered."""
        recorded = next((call for call in self.episode.calls if call.index == self.call), None)
        if recorded is None or recorded.completion is None:
            raise RequestError(f"episode {self.episode.id!r} has no answered call {self.call}")
        return recorded


Steps = Mapping[str, Sequence[Step]]
"""Steps by agent."""


def supervised_data(rollouts: Rollouts, guess_replaced: Rollouts, model: str) -> list[list[Sample]]:
    """Return samples to imitate: each agent's answers in `rollouts` and, with the truth, `guess_replaced`.

    In the latter, the right verdict replaces the decision, and rollouts without a decision are left out.
    Raises RequestError for rollouts with other models.
    """
    groups = [
        scored.samples() for agent, episodes in rollouts.items() for scored in _parts(agent, episodes, model)
    ]
    for agent, episodes in guess_replaced.items():
        truths = map(true_decision, _parts(agent, episodes, model))
        groups += [[truth] for truth in truths if truth is not None]
    return [group for group in groups if group]


def dpo_data(positive: Steps, negative: Steps, model: str) -> list[list[Pair]]:
    """Pair each positive step with the negative step at the same index. Equal answers are left out.

    Raises RequestError for steps that do not match, or that another model answered.
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
            _require_model(agent, [step.recorded_call], model)
            if is_play(step.episode):
                names = {node.agent for node in read_tree(step.episode).nodes if node.call == step.call}
                if names != {agent}:
                    raise RequestError(f"a step of '{agent}' is a turn of '{', '.join(names)}'")
        pairs = []
        for index, (good, bad) in enumerate(zip(chosen, negative[agent], strict=True)):
            better = make_sample([good.recorded_call], good.episode, 1.0, agent=agent)
            worse = make_sample([bad.recorded_call], bad.episode, 0.0, agent=agent)
            if not same_prompt(better, worse):
                raise RequestError(
                    f"the positive and the negative step {index} of '{agent}' answer different prompts: call "
                    f"{good.call} of {good.episode.id!r} and call {bad.call} of {bad.episode.id!r}"
                )
            pairs.append(make_pair(better, worse))
        groups.append([*filter(None, pairs)])
    return [group for group in groups if group]


def grpo_data(rollouts: Rollouts, rewards: Mapping[str, float] | None, model: str) -> list[list[Sample]]:
    """Return each agent's samples from its rollouts, grouped by agent and example.

    `rewards` maps episode ids to rewards; None takes the agent's reward in the play. Raises RequestError for
    an episode without a reward, or with another model.
    """
    groups: dict[tuple[str, str], list[Sample]] = {}
    for agent, episodes in rollouts.items():
        for scored in _parts(agent, episodes, model):
            own = scored.reward if rewards is None and is_play(scored.episode) else None
            given = own if rewards is None else rewards.get(scored.episode.id)
            try:
                reward = _FINITE.validate_python(given)
            except ValidationError as error:
                raise RequestError(
                    f"the reward of episode {scored.episode.id!r} is {given!r}, not a finite number; give "
                    "it in `rewards`"
                ) from error
            group = groups.setdefault((agent, scored.episode.example.id), [])
            group += replace(scored, reward=reward).samples()
    return [group for group in groups.values() if group]


def _parts(agent: str, episodes: Sequence[EpisodeRecord], model: str) -> Iterator[ScoredEpisode]:
    """Yield an agent's part of each episode. In a play it has the agent's reward, otherwise the reward 0.

    Raises RequestError if other models gave all of the agent's answers.
    """
    parts: list[ScoredEpisode] = []
    answers: list[Call] = []
    for episode in episodes:
        if is_play(episode):
            turns = {node.call for node in read_tree(episode).nodes if node.agent == agent}
            answers += [call for call in episode.calls if call.index in turns]
            groups = by_agent([ScoredEpisode(episode, 0.0, targeted_calls(episode, _EVERY, model))])
            parts += [part for group in groups for part in group if part.agent == agent]
            continue
        # Calls of the function with the agent's name. If there are none, the agent is the only one.
        functions = (agent,) if any(call.function == agent for call in episode.calls) else _EVERY
        answers += targeted_calls(episode, functions, None)
        calls = targeted_calls(episode, functions, model)
        parts.append(ScoredEpisode(episode, 0.0, calls, None, agent))
    if answers:
        _require_model(agent, answers, model)
    yield from parts


def _require_model(agent: str, answers: Sequence[Call], model: str) -> None:
    """Raise RequestError unless the model gave one of the agent's answers."""
    models = list(dict.fromkeys(call.model for call in answers))
    if model not in models:
        raise RequestError(
            f"the group's jobs are of the model '{model}', and agent '{agent}' answered with "
            f"{', '.join(repr(other) for other in models)} in these episodes: `ModelJobs` takes the name "
            "that calls are recorded under, the entry of `llms`"
        )
