"""The records of a run, read from its journal: pure functions of what is stored there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from etude.budget.bill import Bill, Line, bill_of, total
from etude.core.episode import EpisodeRecord
from etude.core.history import Entry, EpochEntry, History, ValidationEntry
from etude.core.job import ModelVersion
from etude.core.secrets import masked
from etude.report.files import PLOT
from etude.store.episodes import EVALUATION, iter_episodes
from etude.store.facts import SUMMARY
from etude.store.figures import best_version, last_version
from etude.store.journal import Journal
from etude.store.log import histories
from etude.store.run_folder import RunFolder
from etude.store.stored_config import RESULT, reward_name, stored_data
from etude.store.versions import stored_at
from etude.trackers.record import Checkpoint, EpisodeRow, RunRecord

_LEFT_OUT = {"target", "training", "opponents", "addresses", "model_versions", "failure_causes"}
"""Metrics that are no figures of an epoch, or have names without end."""
_LONGEST = 2000
"""Characters of a text in a table of episodes."""


@dataclass(frozen=True, slots=True)
class Outline:
    """A record that can be read: cheap to have, where the record itself may not be."""

    key: str
    read: Callable[[int, bool], RunRecord]
    """With how many episodes it is to come, and whether with weights."""
    part: str = ""
    """The part of the run whose episodes it is about: `train/3`, `validation/5`, `warm-up`, `eval`."""


def outlines(run: RunFolder) -> list[Outline]:
    """All records that there are by now, in the order in which they are shown. Raises StoreError."""
    reader = _Reader(run)
    by_place = [
        ((entry.epoch, isinstance(entry, ValidationEntry), index), _outline(reader, target, entry))
        for index, (target, history) in enumerate(reader.histories.items())
        for entry in history.entries
    ]
    entries = [outline for _, outline in sorted(by_place, key=lambda pair: pair[0])]
    return [*reader.warm_ups(), *entries, *reader.endings()]


def _outline(reader: _Reader, target: str | None, entry: Entry) -> Outline:
    kind: Literal["validation", "epoch"] = "validation" if isinstance(entry, ValidationEntry) else "epoch"
    part = f"{'train' if kind == 'epoch' else kind}/{entry.epoch}"

    def read(episodes: int, weights: bool) -> RunRecord:
        prefix = "" if target is None else f"{target}/"
        if isinstance(entry, EpochEntry):
            metrics = reader.of_epoch(entry, prefix, target)
        else:
            metrics = figures(entry.metrics, f"{prefix}validation/")
        return RunRecord(
            key=_key(kind, entry.epoch, target),
            kind=kind,
            step=entry.epoch,
            at=_seconds(entry.timestamp),
            metrics=metrics,
            target=target,
            alarms=tuple(event.text for event in entry.alarms if event.is_new),
            episodes=tuple(reader.rows(part, episodes)),
        )

    return Outline(_key(kind, entry.epoch, target), read, part)


def _key(kind: str, epoch: int, target: str | None) -> str:
    return f"{kind}/{epoch:08d}" + ("" if target is None else f"/{target}")


class _Reader:
    """Reads what records are made of."""

    def __init__(self, run: RunFolder) -> None:
        self._run, self._journal = run, run.journal
        self.histories: Mapping[str | None, History] = histories(run.journal, run.name)
        self._bill: Bill | None = None

    def warm_ups(self) -> Iterator[Outline]:
        """Those of warm-ups that are over."""
        for target, history in self.histories.items():
            if (entry := history.warm_up) is not None:
                prefix = "" if target is None else f"{target}/"
                figures_of = {**entry.metrics, "steps": entry.steps, "seconds": entry.seconds}
                record = RunRecord(
                    _key("warm_up", 0, target),
                    "warm_up",
                    0,
                    _seconds(entry.timestamp),
                    figures(figures_of, f"{prefix}warm_up/"),
                    target,
                )
                yield Outline(record.key, partial(_as_it_is, record), "warm-up")

    def endings(self) -> Iterator[Outline]:
        """That of a run, or an evaluation, that is over."""
        result = self._run.read_json(RESULT)
        if result is not None:
            at = (self._run.path / RESULT).stat().st_mtime

            def evaluation(episodes: int, weights: bool) -> RunRecord:
                metrics = figures(result, "evaluation/")
                rows = tuple(self.rows(EVALUATION, episodes))
                return RunRecord("evaluation", "evaluation", 0, at, metrics, episodes=rows)

            yield Outline("evaluation", evaluation, EVALUATION)
        if self._run.read_json(SUMMARY) is not None:
            done = max((len(history.epochs) for history in self.histories.values()), default=0)
            key = _key("finished", done, None)
            yield Outline(key, lambda episodes, weights: self._finished(key, done, weights))

    def _finished(self, key: str, step: int, weights: bool) -> RunRecord:
        bill, images = self.bill, dict[str, Path]()
        checkpoints: list[Checkpoint] = []
        metrics = {f"total/{name}": value for name, value in _spent(bill.total).items()}
        metrics |= {"total/hours": bill.seconds / 3600, "total/gpu_hours": bill.gpu_seconds / 3600}
        for target, history in self.histories.items():
            folder = self._run.path if target is None else self._run.path / "targets" / target
            name = "rewards" if target is None else f"{target}/rewards"
            if (folder / PLOT).is_file():
                images[name] = folder / PLOT
            if weights:
                checkpoints += self._checkpoints(history, target)
        at = (self._run.path / SUMMARY).stat().st_mtime
        return RunRecord(key, "finished", step, at, metrics, images=images, checkpoints=tuple(checkpoints))

    def _checkpoints(self, history: History, target: str | None) -> Iterator[Checkpoint]:
        """The best weights and the last ones, once where they are the same, where the run folder has them."""
        aliases: dict[int, list[str]] = {}
        versions: dict[int, ModelVersion] = {}
        for alias, version in (("best", best_version(history)), ("latest", last_version(history))):
            if version is not None and version.number:
                aliases.setdefault(version.number, []).append(alias)
                versions[version.number] = version
        for number, version in versions.items():
            place = stored_at(self._run.path, version)
            if place is not None and place.is_dir():
                yield Checkpoint(place, number, tuple(aliases[number]), target)

    @property
    def bill(self) -> Bill:
        """All that the run has taken, read once."""
        if self._bill is None:
            self._bill = bill_of(self._journal)
        return self._bill

    def of_epoch(self, entry: EpochEntry, prefix: str, target: str | None) -> dict[str, float]:
        """The figures of an epoch's episodes, of its job, and of what both took."""
        metrics = figures(entry.metrics, f"{prefix}train/")
        metrics |= figures(entry.metrics.get("training") or {}, f"{prefix}learner/")
        tokens, seconds = (entry.metrics.get(key) for key in ("completion_tokens", "collecting_seconds"))
        if tokens and seconds:
            metrics[f"{prefix}train/tokens_per_second"] = tokens / seconds
        phase = re.compile(rf"train/{entry.epoch}(?!\d)")
        # What the episodes of several models' epochs took is theirs together.
        if target is None or target == next(iter(self.histories)):
            lines = [line for line in self.bill.lines if phase.match(line.phase)]
            metrics |= {f"cost/{name}": value for name, value in _spent(total(lines)).items()}
        if entry.status is not None:
            job = [line for line in self.bill.lines if line.phase == entry.status.run_id]
            metrics |= {f"{prefix}learner/cost_{name}": value for name, value in _spent(total(job)).items()}
        return metrics

    def rows(self, phase: str, count: int) -> Iterator[EpisodeRow]:
        """The first episodes of a phase by their ids: of the same examples each time."""
        if not count:
            return
        reward = reward_name(stored_data(self._run.path, required=False))
        for number, record in enumerate(iter_episodes(self._journal, phase=phase), 1):
            yield _row(self._journal, record, reward)
            if number == count:
                return


def _as_it_is(record: RunRecord, episodes: int, weights: bool) -> RunRecord:
    return record


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


def _seconds(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()
