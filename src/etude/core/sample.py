"""Samples: the one value between the recorder's branches and the gradient, over files and the wire too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import mul
from typing import Any, Literal, TypeAlias

from etude.core.call import PLAIN_SAMPLING, Sampling
from etude.core.message import Message, Tool

Kind = Literal["samples", "pairs", "imitation"]
"""The data of an algorithm: samples with logprobs, pairs, or samples to imitate, which need none."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer within a sample: `ids[start:stop]` are its tokens."""

    start: int = 0
    stop: int = 0
    message: int = -1
    """Index of the answer among the sample's messages; -1 where the sample has none."""
    sampling: Sampling = PLAIN_SAMPLING
    """How it was sampled, as far as the distributions of its tokens depend on it."""
    model_version: int | None = None
    """Version of the weights that sampled it; None where nobody knows."""
    call: int | None = None
    """Index of the call within the episode."""
    function: str | None = None
    """The agent's function that made the call."""
    finish_reason: str = "stop"
    value: float | None = None
    """Discounted return from this answer on, where the agent gave step rewards."""
    divergence: float = 0.0
    """Σ log π_sampled - log π_reference over its tokens in nats, where a learner has measured it."""
    replaced: bool = False
    """Its text was written in place of what was sampled: it has no tokens until a backend makes them."""
    token_ids: tuple[int, ...] | None = None
    """Its tokens where the engine returns them without those of the prompt, and the sample so has no `ids`:
    for backends that render prompts themselves."""
    logprobs: tuple[float, ...] | None = None
    """Those of `token_ids`."""


PER_TOKEN = ("logprobs", "advantages", "weights", "teacher_logprobs")
"""The fields of a sample that are one number per token, where it has them."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One token sequence that is trained on. All per-token fields have the length T of `ids`."""

    ids: tuple[int, ...] = ()
    """Prompt and answers in turn; empty where the engine tells no token ids."""
    mask: tuple[bool, ...] = ()
    """Which tokens the policy sampled: those that are trained on."""
    logprobs: tuple[float, ...] | None = None
    """Under the distributions that were sampled from; 0 where the mask is False. None where the engine does
    not tell them."""
    advantages: tuple[float, ...] | None = None
    """How much better than expected each choice was; None until an algorithm has said so."""
    weights: tuple[float, ...] | None = None
    """Share of each token in the loss, in place of the mask."""
    teacher_logprobs: tuple[float, ...] | None = None
    """Under a teacher that was asked for the same tokens."""
    turns: tuple[Turn, ...] = ()
    reward: float = 0.0
    example: str | None = None
    episode: str | None = None
    """Id of the episode, whose samples (branches) count as one in a group's statistics."""
    generation: int | None = None
    branch: int = 0
    agent: str | None = None
    """Whose answers these are, where the agents of an episode are told apart."""
    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)
    """For people who look at it. Nothing depends on them."""
    group_rewards: Sequence[float] | None = None
    """Rewards of all episodes of its group, also of those that are not trained on."""

    def __post_init__(self) -> None:
        length = len(self.ids)
        given = (self.mask, self.logprobs, self.advantages, self.weights, self.teacher_logprobs)
        for values in given:
            if values is not None and len(values) != length:
                lengths = {length, *(len(values) for values in given if values is not None)}
                raise ValueError(f"per-token fields differ in length: {sorted(lengths)}")

    @classmethod
    def of_turns(cls, turns: Sequence[tuple[Turn, Any]], **facts: Any) -> Sample:
        """The sample of turns in order, whose `start` and `stop` are made here.

        With each comes what has its tokens: `context_ids` (those since the turn before, as the model saw
        them), `token_ids` (those that were sampled) and a number for each sampled token under the names of
        `PER_TOKEN`. Where one of them is None, the sample's field is. Raises ValueError for too few numbers.
        """
        ids: list[int] = []
        mask: list[bool] = []
        placed: list[Turn] = []
        for turn, own in turns:
            for name in PER_TOKEN:
                numbers = getattr(own, name)
                if numbers is not None and len(numbers) != len(own.token_ids):
                    raise ValueError(f"{len(numbers)} {name} for {len(own.token_ids)} sampled tokens")
            start = len(ids) + len(own.context_ids)
            ids += [*own.context_ids, *own.token_ids]
            mask += [False] * len(own.context_ids) + [True] * len(own.token_ids)
            placed.append(replace(turn, start=start, stop=len(ids)))
        for name in PER_TOKEN:
            if turns and all(getattr(own, name) is not None for _, own in turns):
                spread: list[float] = []
                for _, own in turns:
                    spread += [0.0] * len(own.context_ids) + [*map(float, getattr(own, name))]
                facts[name] = tuple(spread)
        return cls(ids=tuple(ids), mask=tuple(mask), turns=tuple(placed), **facts)

    @property
    def answers(self) -> list[tuple[Turn, dict[str, Any]]]:
        """The turns with their tokens, by the names that `of_turns` has them under."""
        answers, end = [], 0
        for turn in self.turns:
            own = slice(turn.start, turn.stop)
            tokens: dict[str, Any] = {"context_ids": self.ids[end : turn.start], "token_ids": self.ids[own]}
            for name in PER_TOKEN:
                values = getattr(self, name)
                tokens[name] = None if values is None else values[own]
            answers.append((turn, tokens))
            end = turn.stop
        return answers

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Itself, as a unit of the learner's."""
        return (self,)

    @property
    def loss_weights(self) -> Sequence[float]:
        """Share of each token in the loss [T]."""
        return self.mask if self.weights is None else self.weights

    @property
    def gains(self) -> Sequence[float]:
        """The advantages [T]; where there are none, 1 for what the policy sampled."""
        return self.mask if self.advantages is None else self.advantages

    @property
    def has_gradient(self) -> bool:
        """Whether any token has both a weight and an advantage."""
        return any(map(mul, self.loss_weights, self.gains))

    @property
    def returns(self) -> list[float] | None:
        """The return of each turn; None where the agent gave no step rewards."""
        if all(turn.value is None for turn in self.turns):
            return None
        return [self.reward if turn.value is None else turn.value for turn in self.turns]

    @property
    def turn_rewards(self) -> list[float]:
        """The return of each turn, or the reward for all of them."""
        return self.returns or [self.reward] * len(self.turns)

    def weighted(self, factors: Iterable[float]) -> Sample:
        """The sample with the weights of each turn's tokens times a factor."""
        return replace(self, weights=tuple(map(mul, self.loss_weights, self.by_token(factors))))

    def by_token(self, values: Iterable[float]) -> tuple[float, ...]:
        """A number for each turn as one for each token [T], with 0 for what was not sampled."""
        spread = [0.0] * len(self.ids)
        for turn, value in zip(self.turns, values, strict=True):
            spread[turn.start : turn.stop] = [value] * (turn.stop - turn.start)
        return tuple(spread)


@dataclass(frozen=True, slots=True)
class Pair:
    """A preference. Both samples begin with the same `shared` tokens, which are not trained on."""

    chosen: Sample
    rejected: Sample
    shared: int = 0
    notes: Mapping[str, Any] = field(default_factory=dict)
    group_rewards: Sequence[float] | None = None
    """As those of a sample."""

    def __post_init__(self) -> None:
        for name, sample in (("chosen", self.chosen), ("rejected", self.rejected)):
            mask = (False,) * min(self.shared, len(sample.ids)) + sample.mask[self.shared :]
            object.__setattr__(self, name, replace(sample, mask=mask))

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Both, as a unit of the learner's."""
        return (self.chosen, self.rejected)

    @property
    def reward(self) -> float:
        """By how much the chosen one is better."""
        return self.chosen.reward - self.rejected.reward


SampleOrPair: TypeAlias = Sample | Pair
"""The unit of learning: the samples of a pair are in one optimiser step and one micro-batch."""


def shared_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the longest common beginning of two lists, tuples or texts, which is found by halving."""
    same, differs = 0, min(len(a), len(b)) + 1
    if a[: differs - 1] == b[: differs - 1]:
        return differs - 1
    while differs - same > 1:
        middle = (same + differs) // 2
        if a[same:middle] == b[same:middle]:
            same = middle
        else:
            differs = middle
    return same
