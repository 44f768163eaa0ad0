"""Figures of what a model said in the episodes of an epoch: how long, how surely, and how often the same."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from etude.core.episode import SIMULATED_USER, EpisodeRecord


@dataclass(frozen=True, slots=True)
class _Figures:
    """The model's answers in one episode."""

    example: str
    answers: int
    tokens: int
    surprise: float
    """Σ -log p of the tokens that were sampled, in nats."""
    surprises: int
    """How many tokens that is of."""
    digest: int | None
    """Equal for equal words; None for an episode that failed."""


@dataclass(slots=True)
class Sampled:
    """Figures of the trained model's answers in episodes. Calls that play a user are not counted."""

    _figures: dict[str, _Figures] = field(default_factory=dict)
    """By episode: figures must not depend on the order in which episodes end."""

    def saw(self, episode: EpisodeRecord, model: str) -> None:
        """Count an episode; `model` is the entry of `llms`."""
        calls = [call for call in episode.calls if call.model == model and call.function != SIMULATED_USER]
        answers = [(call.request, call.completion) for call in calls if call.completion is not None]
        if not answers:
            return
        # A greedy answer tells its logprobs at temperature 1, at which it was not sampled.
        logprobs = [
            completion.logprobs
            for request, completion in answers
            if completion.logprobs and request.sampling.temperature > 0
        ]
        words = tuple(
            completion.completion_ids
            or (str(completion.message.get("content")), str(completion.message.get("tool_calls")))
            for _, completion in answers
        )
        self._figures[episode.id] = _Figures(
            example=episode.example.id,
            answers=len(answers),
            tokens=sum(completion.usage.completion_tokens for _, completion in answers),
            surprise=-math.fsum(value for values in logprobs for value in values),
            surprises=sum(map(len, logprobs)),
            digest=hash(words) if episode.failure is None else None,
        )

    def metrics(self) -> dict[str, Any]:
        """Figures of all episodes; each is None where nothing tells it.

        `answer_tokens`: tokens of an answer, the mean. `sampled_entropy`: -1/N Σ log p over the N tokens that
        were sampled, in nats: an unbiased estimate of the entropy of the distributions that they were sampled
        from. `repeated_share`: Σ (n - d) / Σ (n - 1) over the examples with n ≥ 2 episodes, of which d are
        different, word for word: 0 where all are, and 1 where all are the same.
        """
        figures = self._figures.values()
        answers, tokens = sum(each.answers for each in figures), sum(each.tokens for each in figures)
        surprises = sum(each.surprises for each in figures)
        groups: defaultdict[str, list[int]] = defaultdict(list)
        for each in figures:
            if each.digest is not None:
                groups[each.example].append(each.digest)
        others = sum(len(group) - 1 for group in groups.values())
        repeated = sum(len(group) - len(set(group)) for group in groups.values())
        return {
            "answer_tokens": tokens / answers if answers else None,
            "sampled_entropy": math.fsum(each.surprise for each in figures) / surprises
            if surprises
            else None,
            "repeated_share": repeated / others if others else None,
        }
