"""The records of a run, read from its journal: pure functions of what is stored there."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from functools import cached_property
from itertools import islice
from typing import Any, Literal

from etude.budget.bill import Bill, Line, bill_of, total
from etude.core.episode import EpisodeRecord
from etude.core.history import Entry, EpochEntry, History, ValidationEntry, WarmUpEntry
from etude.core.secrets import masked
from etude.store.episodes import EVALUATION, iter_episodes
from etude.store.facts import SUMMARY
from etude.store.journal import Journal
from etude.store.log import histories
from etude.store.run_folder import RunFolder
from etude.store.stored_config import RESULT, reward_name, stored_data
from etude.trackers.record import EpisodeRow, RunRecord

_LEFT_OUT = {"target", "training", "model_versions", "failure_causes"}
"""Metrics that are no figures of an epoch, or have names without end."""
_LONGEST = 2000
"""Characters of a text in a table of episodes."""


def record_keys(run: RunFolder) -> list[str]:
    """The keys of all records that there are by now, in the order in which they are shown."""
    return [key for key, _, _ in _Reader(run).places()]


def new_records(run: RunFolder, sent: Collection[str], *, episodes: int) -> Iterator[RunRecord]:
    """The records that were not sent, with as many episodes each. Raises StoreError."""
    reader = _Reader(run, episodes)
    for key, target, entry in reader.places():
        if key not in sent:
            yield reader.record(key, target, entry)


def _key(kind: str, epoch: int, target: str | None) -> str:
    return f"{kind}/{epoch:08d}" + ("" if target is None else f"/{target}")


class _Reader:
    """Reads what records are made of."""

    def __init__(self, run: RunFolder, episodes: int = 0) -> None:
        self._run, self._journal = run, run.journal
        self._episodes = episodes
        # Before the histories, which are whole where these are there.
        self._ends = [name for name in (RESULT, SUMMARY) if run.read_json(name) is not None]
        self.histories: Mapping[str | None, History] = histories(run.journal, run.name)

    def places(self) -> Iterator[tuple[str, str | None, Entry | WarmUpEntry | None]]:
        """Of each record the key, the model that it is about where there are several, and its entry."""
        entries: list[tuple[tuple[int, bool, int], str | None, Entry]] = []
        for number, (target, history) in enumerate(self.histories.items()):
            if history.warm_up is not None:
                yield _key("warm_up", 0, target), target, history.warm_up
            for entry in history.entries:
                entries.append(((entry.epoch, isinstance(entry, ValidationEntry), number), target, entry))
        for (epoch, is_validation, _), target, entry in sorted(entries, key=lambda each: each[0]):
            yield _key("validation" if is_validation else "epoch", epoch, target), target, entry
        if RESULT in self._ends:
            yield "evaluation", None, None
        if SUMMARY in self._ends:
            yield _key("finished", self._epochs, None), None, None

    @property
    def _epochs(self) -> int:
        return max((len(history.epochs) for history in self.histories.values()), default=0)

    def record(self, key: str, target: str | None, entry: Entry | WarmUpEntry | None) -> RunRecord:
        """The record of a place."""
        prefix = "" if target is None else f"{target}/"
        if entry is None:
            return self._evaluation(key) if key == "evaluation" else self._finished(key)
        at = datetime.fromisoformat(entry.timestamp).timestamp()
        if isinstance(entry, WarmUpEntry):
            about = {**entry.metrics, "steps": entry.steps, "seconds": entry.seconds}
            return RunRecord(key, "warm_up", 0, at, figures(about, f"{prefix}warm_up/"), target)
        kind: Literal["epoch", "validation"] = "epoch" if isinstance(entry, EpochEntry) else "validation"
        return RunRecord(
            key=key,
            kind=kind,
            step=entry.epoch,
            at=at,
            metrics=self._of_epoch(entry, prefix, target)
            if isinstance(entry, EpochEntry)
            else figures(entry.metrics, f"{prefix}validation/"),
            target=target,
            alarms=tuple(event.text for event in entry.alarms if event.is_new),
            episodes=self._rows(f"{'train' if kind == 'epoch' else kind}/{entry.epoch}"),
        )

    def _evaluation(self, key: str) -> RunRecord:
        metrics = figures(self._run.read_json(RESULT) or {}, "evaluation/")
        at = (self._run.path / RESULT).stat().st_mtime
        return RunRecord(key, "evaluation", 0, at, metrics, episodes=self._rows(EVALUATION))

    def _finished(self, key: str) -> RunRecord:
        metrics = {f"total/{name}": value for name, value in _spent(self._bill.total).items()}
        metrics["total/hours"] = self._bill.seconds / 3600
        at = (self._run.path / SUMMARY).stat().st_mtime
        return RunRecord(key, "finished", self._epochs, at, metrics)

    @cached_property
    def _bill(self) -> Bill:
        """All that the run has taken, read once."""
        return bill_of(self._journal)

    def _of_epoch(self, entry: EpochEntry, prefix: str, target: str | None) -> dict[str, float]:
        """The figures of an epoch's episodes, of its job, and of what both took."""
        metrics = figures(entry.metrics, f"{prefix}train/")
        metrics |= figures(entry.metrics.get("training") or {}, f"{prefix}learner/")
        tokens, seconds = (entry.metrics.get(key) for key in ("completion_tokens", "collecting_seconds"))
        if tokens and seconds:
            metrics[f"{prefix}train/tokens_per_second"] = tokens / seconds
        phase = re.compile(rf"train/{entry.epoch}(?!\d)")
        # What the episodes of several models' epochs took is theirs together.
        if target is None or target == next(iter(self.histories)):
            lines = [line for line in self._bill.lines if phase.match(line.phase)]
            metrics |= {f"cost/{name}": value for name, value in _spent(total(lines)).items()}
        if entry.status is not None:
            job = [line for line in self._bill.lines if line.phase == entry.status.run_id]
            metrics |= {f"{prefix}learner/cost_{name}": value for name, value in _spent(total(job)).items()}
        return metrics

    def _rows(self, phase: str) -> tuple[EpisodeRow, ...]:
        """The first episodes of a phase by their ids: of the same examples each time."""
        reward = reward_name(stored_data(self._run.path, required=False))
        records = iter_episodes(self._journal, phase=phase) if self._episodes else iter(())
        return tuple(_row(self._journal, record, reward) for record in islice(records, self._episodes))


def figures(metrics: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """All numbers in metrics, by their path; what is no number has no place in a plot."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, bool) or name in _LEFT_OUT:
            continue
        if isinstance(value, int | float):
            numbers[f"{prefix}{name}"] = float(value)
        elif isinstance(value, Mapping):
            numbers |= figures(value, f"{prefix}{name}/")
    return numbers


def _spent(line: Line) -> dict[str, float]:
    return {"usd": line.usd, "tokens": float(line.tokens)} if line.tokens else {}


def _row(journal: Journal, record: EpisodeRecord, reward: str | None) -> EpisodeRow:
    prefix = f"{record.id}/score/"
    scores = {key.removeprefix(prefix): value.get("score") for key, value in journal.scan(prefix)}
    answers = [call.completion for call in record.calls if call.completion is not None]
    asked = record.calls[0].request.messages if record.calls else ()
    only = next(iter(scores), None) if len(scores) == 1 else None
    return EpisodeRow(
        episode=record.id,
        example=record.example.id,
        input=_shown("\n".join(_spoken(message) for message in asked)),
        output=_shown("" if record.output is None else str(record.output)),
        reward=scores.get(reward or only or ""),
        scores=scores,
        failure="" if record.failure is None else f"{record.failure.kind}: {record.failure.reason}",
        tokens=sum(answer.usage.completion_tokens for answer in answers),
        version=None if not answers or record.calls[-1].logged else answers[-1].model_version,
    )


def _spoken(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return f"{message.get('role')}: {content if isinstance(content, str) else content or ''}"


def _shown(text: str) -> str:
    """Secrets are masked: unlike the run folder, a tracker may be anybody's."""
    text = masked(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
