"""Counting what failed, and when it is too much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from etude.core.errors import ErrorBudgetExceeded
from etude.core.evaluation import FailureCause, without_numbers

_EXAMPLES = 3
_CAUSES = 5
"""Causes that are told apart in metrics; the others are counted by kind only."""
_LONGEST = 200
"""Characters of a cause."""


@dataclass(slots=True)
class FailureTally:
    """How often each kind of failure happened, and the first few of each."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    _causes: Counter[tuple[str, str]] = field(default_factory=Counter)
    _first: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    """By cause: of the episode that comes first by its id, the message and the id."""

    def add(self, kind: str, where: str, reason: str) -> None:
        """Count a failure of the episode `where`."""
        self.counts[kind] += 1
        shown = self.examples.setdefault(kind, [])
        if len(shown) < _EXAMPLES:
            shown.append(f"{where}: {reason}")
        line = first_line(reason)
        cause = kind, without_numbers(line)
        self._causes[cause] += 1
        # Not the first one in time, which would be another one each time that the run is made.
        earlier = self._first.get(cause)
        if earlier is None or where < earlier[1]:
            self._first[cause] = line, where

    def causes(self) -> list[FailureCause]:
        """The most frequent causes, the most frequent first."""
        ranked = sorted(self._causes.items(), key=lambda item: (-item[1], item[0]))[:_CAUSES]
        return [
            FailureCause(kind=cause[0], reason=reason, count=count, episode=episode)
            for cause, count in ranked
            for reason, episode in [self._first[cause]]
        ]

    def describe(self) -> str:
        """Each kind with its count and its first examples, a line each; the most frequent first."""
        lines = []
        for kind, count in self.counts.most_common():
            lines.append(f"  {kind}: {count}")
            lines += [f"    {example}" for example in self.examples[kind]]
        return "\n".join(lines)


@dataclass(slots=True)
class ErrorBudget:
    """The share of episodes, or of one evaluator's scores, that may fail."""

    share: float
    episodes: int
    """Episodes of the whole run, those to come included."""
    failed_episodes: int = 0
    failed_scores: Counter[str] = field(default_factory=Counter)
    """By evaluator."""
    tally: FailureTally = field(default_factory=FailureTally)

    def episode_failed(self, episode_id: str, kind: str, reason: str) -> None:
        """Count it. Raises ErrorBudgetExceeded as soon as the run cannot end within the budget."""
        self.failed_episodes += 1
        self.tally.add(kind, episode_id, reason)
        self.check(self.episodes)

    def score_failed(self, episode_id: str, evaluator: str, reason: str) -> None:
        """Count it. Raises ErrorBudgetExceeded as soon as the run cannot end within the budget."""
        self.failed_scores[evaluator] += 1
        self.tally.add(f"score:{evaluator}", episode_id, reason)
        self.check(self.episodes)

    def check_all(self) -> None:
        """Raises ErrorBudgetExceeded when the run, now at its end, went over the budget."""
        self.check(self.episodes - self.failed_episodes)

    def check(self, scores: int) -> None:
        """Raises ErrorBudgetExceeded when too many episodes failed, or too many of so many `scores`."""
        if self.failed_episodes > self.share * self.episodes:
            raise self._exceeded(f"{self.failed_episodes} of {self.episodes} episodes failed")
        for evaluator, failed in self.failed_scores.items():
            if failed > self.share * scores:
                raise self._exceeded(f"{failed} of {scores} episodes have no score from '{evaluator}'")

    def _exceeded(self, what: str) -> ErrorBudgetExceeded:
        return ErrorBudgetExceeded(
            f"{what}, more than the error budget of {100 * self.share:g} % allows:\n{self.tally.describe()}\n"
            "All other episodes and scores are kept. Mend the cause and resume the run, or raise the budget."
        )


def merge_causes(causes: Iterable[FailureCause]) -> list[FailureCause]:
    """The causes of several runs together: the most frequent, the most frequent first."""
    merged: dict[tuple[str, str], FailureCause] = {}
    for cause in causes:
        key = cause.kind, without_numbers(cause.reason)
        first = min(merged.get(key, cause), cause, key=lambda each: each.episode)
        count = cause.count + (merged[key].count if key in merged else 0)
        merged[key] = first.model_copy(update={"count": count})
    return sorted(merged.values(), key=lambda cause: (-cause.count, cause.kind, cause.reason))[:_CAUSES]


def first_line(text: str) -> str:
    """The first line of a message that has anything on it, cut to a readable length."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no message")
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"
