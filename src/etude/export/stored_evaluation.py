"""Episodes and scores that a run has stored, in the place of an evaluation run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from etude.core.episode import EpisodeRecord
from etude.core.evaluation import EvalInput, EvalOutput, EvalOutputItem, EvaluationRunOutput
from etude.core.example import Example
from etude.rewards.evaluation_run import EvaluationRun
from etude.rewards.gathering import OnEpisode, OnScore, item_of
from etude.rollout.archive import iter_episodes
from etude.store.journal import Journal


class StoredEvaluation(EvaluationRun):
    """Gives back what one phase of a run has stored, and runs nothing.

    A trajectory builder that works with it builds from a finished run what it built then.
    """

    def __init__(self, journal: Journal, phase: str, evaluators: Sequence[str]) -> None:
        """`phase` is the one that is read, whatever phase is asked for; `evaluators` name its scores."""
        self._journal = journal
        self._phase = phase
        self._evaluators = evaluators

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
        """All episodes of the phase with their scores, by example and generation; arguments play no part."""
        records = [
            record
            for record in iter_episodes(self._journal, f"{self._phase}/")
            if record.id == f"{self._phase}/{record.example.id}/{record.generation}"
        ]
        records.sort(key=lambda record: (record.example.id, record.generation))
        scores = {name: [self._score(record, name) for record in records] for name in self._evaluators}
        failures = Counter(record.failure.kind for record in records if record.failure is not None)
        return EvaluationRunOutput(
            eval_input=EvalInput(eval_input_items=[item_of(record) for record in records]),
            evaluation_results=[(name, _output(items)) for name, items in scores.items()],
            workflow_interrupted=bool(failures),
            failures=dict(failures),
        )

    def _score(self, record: EpisodeRecord, evaluator: str) -> EvalOutputItem:
        """The stored score; of an episode that has none, an item that says so."""
        place = {"id": record.example.id, "generation": record.generation}
        if record.failure is not None:
            reason = f"{record.failure.kind}: {record.failure.reason}"
            return EvalOutputItem(**place, error=reason)
        stored = self._journal.get(f"{record.id}/score/{evaluator}")
        return EvalOutputItem(**place, **(stored or {"error": "not scored before the run was stopped"}))


def _output(items: list[EvalOutputItem]) -> EvalOutput:
    values = [item.score for item in items if item.is_scored and item.score is not None]
    return EvalOutput(
        average_score=math.fsum(values) / len(values) if values else None, eval_output_items=items
    )
