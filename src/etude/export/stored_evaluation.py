"""Episodes and scores that a run has stored, in the place of an evaluation run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from etude.core.episode import EpisodeRecord
from etude.core.evaluation import EvalInput, EvalOutput, EvalOutputItem, EvaluationRunOutput
from etude.core.example import Example
from etude.rewards.collections import numbered, phase_name
from etude.rewards.evaluation_run import EvaluationRun
from etude.rewards.gathering import OnEpisode, OnScore, item_of
from etude.store.episodes import iter_episodes
from etude.store.journal import Journal


class StoredEvaluation(EvaluationRun):
    """Gives back what a run has stored of one epoch, and runs nothing.

    A trajectory builder that works with it builds from a finished run what it built then.
    """

    def __init__(
        self, journal: Journal, phases: Sequence[str], evaluators: Sequence[str], epoch: int | None = None
    ) -> None:
        """`phases` are those that are read, all at once or, with an `epoch`, each by the call that made it;
        `evaluators` name their scores."""
        self._journal = journal
        self._phases = phases
        self._evaluators = evaluators
        self._epoch = epoch
        self._calls: Counter[str] = Counter()

    async def run(
        self,
        examples: Sequence[Example],
        *,
        phase: str = "",
        generations: int = 1,
        sampling: Mapping[str, Any] | None = None,
        on_episode: OnEpisode | None = None,
        on_score: OnScore | None = None,
        keep_episodes: bool = True,
    ) -> EvaluationRunOutput:
        """All episodes with their scores, by example and generation; other arguments play no part."""
        phases = self._asked_for(phase)
        records = [
            record
            for name in phases
            for record in iter_episodes(self._journal, f"{name}/")
            if record.id == f"{name}/{record.example.id}/{record.generation}"
        ]
        # Stable: collections of the same example stay in their order.
        records.sort(key=lambda record: (record.example.id, record.generation))
        if len(phases) > 1:
            records = _numbered_anew(records)
        scores = {name: [self._score(record, name) for record in records] for name in self._evaluators}
        failures = Counter(record.failure.kind for record in records if record.failure is not None)
        return EvaluationRunOutput(
            eval_input=EvalInput(eval_input_items=[item_of(record) for record in records]),
            evaluation_results=[(name, _output(items)) for name, items in scores.items()],
            workflow_interrupted=bool(failures),
            failures=dict(failures),
        )

    def _asked_for(self, label: str) -> Sequence[str]:
        """The phases that a call with this label is given: the one that the same call made in the run."""
        if self._epoch is None:
            return self._phases
        key = phase_name("train", self._epoch, label)
        self._calls[key] += 1
        if key in self._phases:
            # One that was not begun when the run was stopped has no episodes.
            return [numbered(key, self._calls[key])]
        return self._phases if self._calls[key] == 1 else []

    def _score(self, record: EpisodeRecord, evaluator: str) -> EvalOutputItem:
        """The stored score; of an episode that has none, an item that says so."""
        place = {"id": record.example.id, "generation": record.generation}
        if record.failure is not None:
            reason = f"{record.failure.kind}: {record.failure.reason}"
            return EvalOutputItem(**place, error=reason)
        stored = self._journal.get(f"{record.id}/score/{evaluator}")
        return EvalOutputItem(**place, **(stored or {"error": "not scored before the run was stopped"}))


def _numbered_anew(records: Sequence[EpisodeRecord]) -> list[EpisodeRecord]:
    """The episodes of several collections as the generations of one."""
    seen: Counter[str] = Counter()
    generations = []
    for record in records:
        generations.append(replace(record, generation=seen[record.example.id]))
        seen[record.example.id] += 1
    return generations


def _output(items: list[EvalOutputItem]) -> EvalOutput:
    values = [item.score for item in items if item.is_scored and item.score is not None]
    return EvalOutput(
        average_score=math.fsum(values) / len(values) if values else None, eval_output_items=items
    )
