"""An evaluation run: the workflow on many examples, and a score for every episode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etude.core.errors import ErrorBudgetExceeded, RequestError
from etude.core.evaluation import EvaluationRunOutput
from etude.core.example import Example
from etude.core.interfaces import Evaluator
from etude.rewards.failures import ErrorBudget
from etude.rewards.gathering import Gathering, OnEpisode, OnScore, gather
from etude.rewards.scorer import Scorer
from etude.rollout.collector import Collector, EpisodeJob
from etude.store.episodes import read_episode
from etude.store.journal import Journal


class EvaluationRun:
    """Runs the workflow on examples and scores every episode, each episode and score a journalled step.

    A failed episode or score is kept with its reason and counted; it is never a zero.
    """

    def __init__(
        self,
        collector: Collector,
        evaluators: Mapping[str, Evaluator],
        journal: Journal,
        *,
        error_budget: float = 0.2,
        timeout: float = 300.0,
        max_concurrency: int = 16,
    ) -> None:
        """`error_budget` is the share of episodes, or of one evaluator's scores, that may fail.

        `timeout` is for one evaluation, in seconds, where the evaluator has none of its own. At most
        `max_concurrency` evaluations run at the same time, beside the collector's episodes.
        """
        self._collector = collector
        self._journal = journal
        self._error_budget = error_budget
        self._max_concurrency = max_concurrency
        self._scorer = Scorer(evaluators, journal, timeout=timeout, max_concurrency=max_concurrency)

    async def run(
        self,
        examples: Sequence[Example],
        *,
        phase: str = "eval",
        generations: int = 1,
        sampling: Mapping[str, Any] | None = None,
        on_episode: OnEpisode | None = None,
        on_score: OnScore | None = None,
        keep_episodes: bool = True,
    ) -> EvaluationRunOutput:
        """Run `generations` episodes on each example; items come back by example, then generation.

        `phase` is unique for each set of weights: an episode is called `<phase>/<example>/<generation>`,
        and one that the journal has is not run again, nor a score made again. `sampling` overrides the
        models' sampling parameters. `on_episode` is told of each episode when it ends, `on_score` of
        each score; what they raise ends the run. Without `keep_episodes`, items come back without their
        episode, so that the memory in use does not grow with the calls.

        Raises ErrorBudgetExceeded when too many episodes or scores failed. Those failures are then not
        kept: they are tried again when the run is resumed. Everything else is kept.
        """
        _require_unique(examples)
        gathering = Gathering(
            [(example.id, generation) for example in examples for generation in range(generations)],
            self._scorer,
            ErrorBudget(self._error_budget, len(examples) * generations),
            keep_episodes=keep_episodes,
            on_episode=on_episode,
            on_score=on_score,
        )
        records = self._collector.collect(_jobs(examples, phase, generations, sampling))
        try:
            return await gather(records, gathering, 2 * self._max_concurrency)
        except ErrorBudgetExceeded:
            await self._forget_failures(_jobs(examples, phase, generations, sampling))
            raise

    async def _forget_failures(self, jobs: Iterator[EpisodeJob]) -> None:
        """Also of episodes that were not yet counted when the run was stopped."""
        # What was being written when the run was stopped is read below only once it is committed.
        await self._journal.flush()
        for job in jobs:
            record = read_episode(self._journal, job.id, job.example)
            if record is not None and record.failure is not None:
                await self._journal.forget(job.id)
            elif record is not None:
                await self._scorer.forget_failures(job.id)


def _jobs(
    examples: Sequence[Example], phase: str, generations: int, sampling: Mapping[str, Any] | None
) -> Iterator[EpisodeJob]:
    for example in examples:
        for generation in range(generations):
            yield EpisodeJob(
                id=f"{phase}/{example.id}/{generation}",
                example=example,
                generation=generation,
                sampling=sampling or {},
            )


def _require_unique(examples: Sequence[Example]) -> None:
    twice = [name for name, count in Counter(example.id for example in examples).items() if count > 1]
    if twice:
        raise RequestError(f"{len(twice)} example ids are there more than once, the first is {twice[0]!r}")
