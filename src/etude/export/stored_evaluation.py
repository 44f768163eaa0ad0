"""Episodes and scores that a run has stored, in the place of an evaluation run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from etude.core.episode import EpisodeRecord
from etude.core.evaluation import EvalInput, EvalOutputItem, EvaluationRunOutput
from etude.rewards.collections import numbered, phase_name
from etude.rewards.evaluation import Evaluation, EvaluationRequest, item_of, summary_of
from etude.store.episodes import iter_episodes
from etude.store.journal import Journal


class StoredEvaluation(Evaluation):
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

    async def answer(self, request: EvaluationRequest) -> EvaluationRunOutput:
        """All stored episodes with their scores; of the request only the phase counts."""
        phases = self._asked_for(request.phase)
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
            evaluation_results=[(name, summary_of(items)) for name, items in scores.items()],
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
        item = {"id": record.example.id, "generation": record.generation}
        if record.failure is not None:
            reason = f"{record.failure.kind}: {record.failure.reason}"
            return EvalOutputItem(**item, error=reason)
        stored = self._journal.get(f"{record.id}/score/{evaluator}")
        return EvalOutputItem(**item, **(stored or {"error": "not scored before the run was stopped"}))


def _numbered_anew(records: Sequence[EpisodeRecord]) -> list[EpisodeRecord]:
    """The episodes of several collections as the generations of one."""
    seen: Counter[str] = Counter()
    generations = []
    for record in records:
        generations.append(replace(record, generation=seen[record.example.id]))
        seen[record.example.id] += 1
    return generations
