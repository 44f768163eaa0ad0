"""Stored episodes: scored again with other evaluators, and failures forgotten to be tried again."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence

from etude.core.episode import EpisodeRecord, Failure
from etude.core.errors import ErrorBudgetExceeded, RequestError
from etude.core.evaluation import EvaluationRunOutput
from etude.core.interfaces import Evaluator
from etude.rewards.evaluation import OnScore
from etude.rewards.evaluation_run import Gathering, gather
from etude.rewards.failures import ErrorBudget
from etude.rewards.scorer import Scorer
from etude.store.episodes import is_episode, read_episode
from etude.store.journal import Journal


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

    The scores are kept under `<episode id>/rescore:<label>/<evaluator>`, beside those that the run
    itself went by. Rescoring under the same label again gives back what is there; take another label
    when an evaluator has changed. The other arguments are those of `EvaluationRun`.

    Raises RequestError when the phase has no episodes, ErrorBudgetExceeded when too many scores failed.
    """
    if not label or "/" in label:
        raise RequestError(f"a label is a word without '/', found {label!r}")
    ids = _episode_ids(journal, phase)
    if not ids:
        raise RequestError(f"{journal.path} has no episodes of the phase '{phase}'")
    scorer = Scorer(
        evaluators,
        journal,
        timeout=timeout,
        max_concurrency=max_concurrency,
        label=f"rescore:{label}",
    )
    gathering = Gathering(
        list(ids), scorer, ErrorBudget(error_budget, len(ids)), keep_episodes=keep_episodes, on_score=on_score
    )
    try:
        return await gather(_stored(journal, list(ids.values())), gathering, 2 * max_concurrency)
    except ErrorBudgetExceeded:
        for episode_id in ids.values():
            await scorer.forget_failures(episode_id)
        raise


def _episode_ids(journal: Journal, phase: str) -> dict[tuple[str, int], str]:
    """The ids of a phase's episodes by example and generation, sorted by these."""
    ids: dict[tuple[str, int], str] = {}
    for key, data in journal.scan(f"{phase}/"):
        if is_episode(data):
            example, generation = data["example"]["id"], data["generation"]
            # Not an episode of the phase `<phase>/…`.
            if key == f"{phase}/{example}/{generation}":
                ids[example, generation] = key
    return dict(sorted(ids.items()))


async def _stored(journal: Journal, ids: Sequence[str]) -> AsyncGenerator[EpisodeRecord]:
    for episode_id in ids:
        record = read_episode(journal, episode_id)
        if record is not None:
            yield record


async def forget_failures(journal: Journal, is_open: Callable[[str], bool]) -> Counter[str]:
    """Forget failures that were not the agent's own; how many there were of each kind.

    These are episodes whose model did not answer, and scores that an evaluator failed to give
    (`score:<evaluator>`). Of an episode only its end is forgotten: calls that were answered are kept.
    Only episodes are looked at for whose id `is_open` is true. Raises StoreError.
    """
    failures = list(_failures(journal, is_open))
    for key, _ in failures:
        await journal.forget(key)
    return Counter(kind for _, kind in failures)


def _failures(journal: Journal, is_open: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    """The journal key and the kind of each."""
    for key, value in journal.scan():
        if not is_episode(value) or value["episode"] != key or not is_open(key):
            continue
        if value["failure"] is None:
            yield from _failed_scores(journal, f"{key}/score/")
        elif (failure := Failure(*value["failure"])).origin == "model":
            yield key, failure.kind


def _failed_scores(journal: Journal, prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in journal.scan(prefix):
        if value.get("error") is not None:
            yield key, f"score:{key.removeprefix(prefix)}"
