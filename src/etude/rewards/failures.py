"""Counting what failed, and when it is too much."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from etude.core.errors import ErrorBudgetExceeded

_EXAMPLES = 3


@dataclass(slots=True)
class FailureTally:
    """How often each kind of failure happened, and the first few of each."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, where: str, reason: str) -> None:
        """Count a failure of the episode `where`."""
        self.counts[kind] += 1
        shown = self.examples.setdefault(kind, [])
        if len(shown) < _EXAMPLES:
            shown.append(f"{where}: {reason}")

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
