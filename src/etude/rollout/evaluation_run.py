"""An evaluation run: the workflow on many examples, with a score for every episode.

It can also rescore stored episodes with other evaluators, and forget failures so that they are retried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping

from etude.core.episode import EpisodeRecord, Example, Failure, LoggedExample
from etude.core.errors import ErrorBudgetExceeded, RequestError
from etude.core.evaluation import EvaluationRunOutput
from etude.core.interfaces import Evaluator
from etude.rollout.collector import Collector, EpisodeJob
from etude.rollout.evaluation import Evaluation, EvaluationRequest, OnScore, ScoreCollector
from etude.rollout.scorer import Scorer
from etude.store.episodes import episode_phase, read_episode, stored_episodes
from etude.store.journal import Journal


class EvaluationRun(Evaluation):
    """Runs the workflow on examples and scores every episode; each episode and score is a journalled step.

    A failed episode or score is kept with its reason and counted. It is never a zero.
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

        `timeout` is for one evaluation, in seconds, unless the evaluator has its own. At most
        `max_concurrency` evaluations run at the same time, in addition to the collector's episodes.
        """
        self._collector = collector
        self._journal = journal
        self._error_budget = error_budget
        self._scorer = Scorer(evaluators, journal, timeout=timeout, max_concurrency=max_concurrency)

    async def answer(self, request: EvaluationRequest) -> EvaluationRunOutput:
        """Run and score the episodes that the journal does not have yet.

        `phase` is unique for each set of weights. An episode is named `<phase>/<example>/<generation>`. An
        episode or score in the journal is not made again.

        Raises ErrorBudgetExceeded if too many episodes or scores failed. Then failures are forgotten, so that
        a resumed run retries them. Everything else is kept.
        """
        counts = Counter(example.id for example in request.examples)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise RequestError(f"{len(twice)} example ids occur more than once; the first is {twice[0]!r}")
        phase = request.phase or "eval"
        jobs = [job for example in request.examples for job in _jobs(example, phase, request)]
        gathering = ScoreCollector(
            [(job.example.id, job.generation) for job in jobs],
            self._scorer,
            self._error_budget,
            keep_episodes=request.keep_episodes,
            on_episode=request.on_episode,
            on_score=request.on_score,
            wait_for_calls=self._collector.wait_for_calls,
        )
        try:
            async with self._journal.beginning(f"{phase}/"):
                return await gathering.score_all(self._collector.collect(jobs))
        except ErrorBudgetExceeded:
            # Failures of episodes that were not yet counted are forgotten too. Pending writes must be
            # committed first, since the loop reads only committed records.
            await self._journal.flush()
            for job in jobs:
                record = read_episode(self._journal, job.id, job.example)
                if record is not None and record.failure is not None:
                    await self._journal.forget(job.id)
                elif record is not None:
                    await self._scorer.forget_failures(job.id, self._journal)
            raise


async def rescore(
    journal: Journal,
    evaluators: Mapping[str, Evaluator],
    *,
    phase: str,
    label: str,
    error_budget: float = 0.2,
    timeout: float = 300.0,  # noqa: ASYNC109 - of one evaluation, not of the whole
    max_concurrency: int = 16,
    on_score: OnScore | None = None,
    keep_episodes: bool = True,
) -> EvaluationRunOutput:
    """Score the stored episodes of a phase; items come back by the example's id, then generation.

    The scores are kept under `<episode id>/rescore:<label>/<evaluator>`, next to the run's own scores. A
    second call with the same label returns the stored scores, so use another label if an evaluator has
    changed. The other arguments are the same as for `EvaluationRun`.

    Raises RequestError if the phase has no episodes, and ErrorBudgetExceeded if too many scores failed.
    """
    ids = {
        (data["example"]["id"], data["generation"]): key
        for key, data in stored_episodes(journal, f"{phase}/")
        if episode_phase(data) == phase
    }
    if not ids:
        raise RequestError(f"{journal.path} has no episodes of the phase '{phase}'")
    order = sorted(ids)
    scorer = Scorer(
        evaluators, journal, timeout=timeout, max_concurrency=max_concurrency, label=f"rescore:{label}"
    )
    gathering = ScoreCollector(order, scorer, error_budget, keep_episodes=keep_episodes, on_score=on_score)

    async def records() -> AsyncGenerator[EpisodeRecord]:
        for key in order:
            record = read_episode(journal, ids[key])
            if record is not None:
                yield record

    try:
        return await gathering.score_all(records())
    except ErrorBudgetExceeded:
        await journal.flush()  # As in `EvaluationRun.answer`.
        for episode_id in ids.values():
            await scorer.forget_failures(episode_id, journal)
        raise


async def forget_failures(journal: Journal, is_open: Callable[[str], bool]) -> Counter[str]:
    """Forget failures that the agent did not cause, and return their number by kind.

    These are episodes whose model, tool or environment failed, and scores that an evaluator failed to give
    (`score:<evaluator>`). Only the end of an episode is forgotten: answered calls are kept. Only episodes
    whose id passes `is_open` are examined. Raises StoreError.
    """
    failures: dict[str, str] = {}
    for key, data in stored_episodes(journal):
        if not is_open(key):
            continue
        if data["failure"] is None:
            prefix = f"{key}/score/"
            failed = (scored for scored, value in journal.scan(prefix) if value.get("error") is not None)
            failures |= {scored: f"score:{scored.removeprefix(prefix)}" for scored in failed}
        elif (failure := Failure(*data["failure"])).origin != "agent":
            failures[key] = failure.kind
    for key in failures:
        await journal.forget(key)
    return Counter(failures.values())


def _jobs(example: Example, phase: str, request: EvaluationRequest) -> Iterator[EpisodeJob]:
    """Yield the jobs for an example. A logged example gets one for each of its episodes."""
    logged = example if isinstance(example, LoggedExample) else None
    plain = example if logged is None else Example(example.id, example.inputs, example.expected)
    for generation in range(request.generations if logged is None else logged.episodes):
        name = f"{phase}/{example.id}/{generation}"
        yield EpisodeJob(name, plain, generation, request.sampling or {}, logged, request.widths)
