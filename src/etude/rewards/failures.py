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
class ErrorBudget:
    """The share of episodes, or of one evaluator's scores, that may fail; and all that has failed so far."""

    share: float
    episodes: int
    """Episodes of the whole run, those to come included."""
    failed_episodes: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Failed episodes by kind, and failed scores as `score:<evaluator>`."""
    failures: list[FailureCause] = field(default_factory=list)

    def episode_failed(self, episode_id: str, kind: str, reason: str) -> None:
        """Count it. Raises ErrorBudgetExceeded as soon as the run cannot end within the budget."""
        self.failed_episodes += 1
        self._add(kind, episode_id, reason)

    def score_failed(self, episode_id: str, evaluator: str, reason: str) -> None:
        """Count it. Raises ErrorBudgetExceeded as soon as the run cannot end within the budget."""
        self._add(f"score:{evaluator}", episode_id, reason)

    def check_all(self) -> None:
        """Raises ErrorBudgetExceeded when the run, now at its end, went over the budget."""
        self._check(self.episodes - self.failed_episodes)

    def _add(self, kind: str, episode_id: str, reason: str) -> None:
        self.counts[kind] += 1
        self.failures.append(FailureCause(kind=kind, reason=reason, count=1, episode=episode_id))
        self._check(self.episodes)

    def _check(self, scores: int) -> None:
        """Raises when too many episodes failed, or too many of so many `scores` of an evaluator."""
        if self.failed_episodes > self.share * self.episodes:
            raise self._exceeded(f"{self.failed_episodes} of {self.episodes} episodes failed")
        for kind, failed in self.counts.items():
            if kind.startswith("score:") and failed > self.share * scores:
                evaluator = kind.removeprefix("score:")
                raise self._exceeded(f"{failed} of {scores} episodes have no score from '{evaluator}'")

    def _exceeded(self, excess: str) -> ErrorBudgetExceeded:
        """The error: each kind with its count and its first examples, the most frequent first."""
        lines = [f"{excess}, more than the error budget of {100 * self.share:g} % allows:"]
        for kind, count in self.counts.most_common():
            of_kind = [failure for failure in self.failures if failure.kind == kind]
            lines.append(f"  {kind}: {count}")
            lines += [f"    {failure.episode}: {failure.reason}" for failure in of_kind[:_EXAMPLES]]
        lines.append(
            "All other episodes and scores are kept. Mend the cause and resume the run, or raise the budget."
        )
        return ErrorBudgetExceeded("\n".join(lines))


def merge_causes(causes: Iterable[FailureCause]) -> list[FailureCause]:
    """The causes with those that differ in numbers only added up: the most frequent, in that order.

    Of each the first line of the message, and the episode that comes first by its id: not the first one in
    time, which would be another one each time that the run is made.
    """
    merged: dict[tuple[str, str], FailureCause] = {}
    for cause in causes:
        line = next((line.strip() for line in cause.reason.splitlines() if line.strip()), "no message")
        reason = line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"
        key = cause.kind, without_numbers(reason)
        cause = cause.model_copy(update={"reason": reason})
        known = merged.get(key)
        count = cause.count + (known.count if known else 0)
        first = min(known or cause, cause, key=lambda each: each.episode)
        merged[key] = first.model_copy(update={"count": count})
    return sorted(merged.values(), key=lambda cause: (-cause.count, cause.kind, cause.reason))[:_CAUSES]
