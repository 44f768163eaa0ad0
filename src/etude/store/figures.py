"""The figures of a run, computed from its history alone: rewards by version, the summary, and warnings."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, Field

from etude.core.evaluation import FailureCause, merge_causes
from etude.core.history import Entry, History, Score, WarmUpEntry
from etude.core.job import ModelVersion
from etude.core.stats import Distribution


class _Rewarded(BaseModel, frozen=True):
    n: int | None
    """How many rewards there are."""
    avg_reward: float | None
    reward_low: float | None
    reward_high: float | None

    @property
    def reward(self) -> Score:
        """The mean reward with its interval."""
        return Score(mean=self.avg_reward, low=self.reward_low, high=self.reward_high, n=self.n)


def _reward_fields(reward: Score) -> dict[str, Any]:
    return {"n": reward.n, "avg_reward": reward.mean, "reward_low": reward.low, "reward_high": reward.high}


class Figure(_Rewarded, frozen=True):
    """The figures of a validation, or of an epoch's episodes, which are sampled before its update."""

    measured: str
    """In words: the episodes or examples that were measured, and the version."""
    epoch: int
    version: int | None
    """The number of the weights, or None if the backend does not report it."""
    distribution: Distribution | None
    evaluators: dict[str, Score]

    @classmethod
    def from_entry(cls, entry: Entry) -> Self:
        """Return the figures of an entry."""
        return cls(
            measured=entry.measured_on,
            epoch=entry.epoch,
            version=entry.measured_with,
            distribution=entry.distribution,
            evaluators=entry.evaluators,
            **_reward_fields(entry.reward),
        )


class WarmUpFigure(_Rewarded, frozen=True):
    """The figures of a warm-up. Its reward, if it was measured, is on training examples."""

    steps: int
    seconds: float
    version: int | None
    loss: float | None

    @classmethod
    def from_entry(cls, entry: WarmUpEntry) -> Self:
        """Return the figures of a warm-up."""
        version = None if entry.version is None else entry.version.number
        about = {"steps": entry.steps, "seconds": entry.seconds, "loss": entry.metrics.get("loss")}
        return cls(version=version, **about, **_reward_fields(Score.from_metrics(entry.metrics)))


VALIDATION = "validation"
TRAINING = "training episodes"


def with_rewards(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries that have a reward."""
    return [entry for entry in entries if entry.reward.mean is not None]


def failed_counts(metrics: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many episodes failed, and how many scores of the other episodes failed."""
    failures: Mapping[str, int] = metrics.get("failures") or {}
    scores = sum(count for kind, count in failures.items() if kind.startswith("score:"))
    return sum(failures.values()) - scores, scores


def _measured_versions(history: History) -> list[tuple[ModelVersion, float]]:
    """Return the measured versions with their rewards, oldest first.

    Rewards come from validations if there are any, else from the episodes sampled from each version.
    """
    entries: Sequence[Entry] = history.all_validations if history.validations else history.epochs
    versions = ((entry.weights, entry.reward.mean) for entry in entries)
    return [(version, reward) for version, reward in versions if version is not None and reward is not None]


def last_version(history: History) -> ModelVersion | None:
    """Return the version that the model is at: the last epoch's, else the warm-up's."""
    versions = (entry.version for entry in reversed(history.epochs))
    return next((version for version in versions if version is not None), history.start)


def best_version(history: History) -> ModelVersion | None:
    """Return the version with the highest validation reward, the latest of equals. It may be the base model.

    Returns None if no version was measured after training: the best one is unknown then.
    """
    measured = _measured_versions(history) if history.validations else []
    start = 0 if history.start is None else history.start.number
    if all(version.number <= start for version, _ in measured):
        return None
    return max(measured, key=lambda pair: (pair[1], pair[0].number))[0]


def versions_to_keep(history: History, count: int) -> list[ModelVersion]:
    """Return the `count` best versions, the last one, from which a run is resumed, and the warm-up's, with
    which training began. The oldest comes first."""
    ranked = sorted(_measured_versions(history), key=lambda pair: (-pair[1], -pair[0].number))
    best = list({version.number: version for version, _ in ranked}.values())[:count]
    last = last_version(history)
    kept = [*best, *(version for version in (last, history.start) if version is not None)]
    return sorted({version.number: version for version in kept}.values(), key=lambda each: each.number)


def versions_made(history: History) -> list[int]:
    """Return the numbers of the versions that were made, oldest first: the warm-up's and the epochs'."""
    versions = (history.start, *(entry.version for entry in history.trained_epochs))
    return [version.number for version in versions if version is not None]


def _location(version: ModelVersion) -> str:
    """Return the backend's name for a version; empty if its weights are in the run folder."""
    is_here = "checkpoints" in Path(version.location).parts or not version.number
    return "" if is_here else f"  {version.location}"


VALIDATION_KEY = "finetuning.run_configuration.validation_dataset"


class Summary(BaseModel, frozen=True):
    """A run in numbers and in sentences."""

    run_id: str = ""
    epochs_trained: int = 0
    epochs_skipped: int = 0
    measured_on: str = TRAINING
    warm_up: WarmUpFigure | None = None
    """The warm-up, if there was one."""
    before: Figure | None = None
    """The validation of the base model. All validations here are on the same examples."""
    warm: Figure | None = None
    """The validation after the warm-up."""
    after: Figure | None = None
    """The last validation after training."""
    first_epoch: Figure | None = None
    last_epoch: Figure | None = None
    """None if there is only one epoch."""
    is_measured: bool = True
    """Whether the last weights were measured after they were trained."""
    best_version: ModelVersion | None = None
    """The best measured version, or None if none was measured."""
    last_version: ModelVersion | None = None
    warnings: list[str] = Field(default_factory=list)
    stopped: str | None = None
    """Why an alarm ended the run early."""
    targets: dict[str, Summary] = Field(default_factory=dict)
    """The summary of each model, in a run that trains several. Only these have figures and versions. An epoch
    counts as trained if any model was trained in it."""

    def shown_ends(self, *, short: bool = False) -> list[str | None]:
        """Return the rewards before and after training as texts, with their intervals unless `short`.

        They are of validations if there are any, else of the first and the last epoch.
        """
        is_validated = self.measured_on == VALIDATION
        texts: list[str | None] = []
        for figure in (self.before, self.after) if is_validated else (self.first_epoch, self.last_epoch):
            if figure is None or figure.avg_reward is None:
                texts.append(None)
                continue
            shown = str(Score(mean=figure.avg_reward)) if short else str(figure.reward)
            texts.append(shown if is_validated else f"{shown} in epoch {figure.epoch}")
        return texts

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield labels and texts of one model's figures and versions."""
        if (warm_up := self.warm_up) is not None:
            version = "" if warm_up.version is None else f": v{warm_up.version}"
            value = "" if warm_up.loss is None else f", loss {warm_up.loss:.3f}"
            if warm_up.avg_reward is not None:
                value = f", reward {warm_up.reward} n={warm_up.n} (training examples)"
            yield "warm-up", f"{warm_up.steps} steps of imitation{value}{version}"
        validated = self.measured_on == VALIDATION
        known = {"before": self.before, "warm": self.warm, "after": self.after}
        if not validated:
            known = {"first": self.first_epoch, "last": self.last_epoch}
        figures = {key: figure for key, figure in known.items() if figure is not None}
        for key, figure in figures.items():
            when = f" {key}" if figures.keys() & {"before", "warm"} else ""
            yield f"reward{when}", f"{figure.reward.with_count}  ({figure.measured})"
            if (found := figure.distribution) is not None:
                yield f"distribution{when}", f"{found}: {found.shown_bars()}"
        names = list(dict.fromkeys(name for figure in figures.values() for name in figure.evaluators))
        for name in names:
            scores = [figure.evaluators.get(name, Score()) for figure in figures.values()]
            is_reward = [score.mean for score in scores] == [each.avg_reward for each in figures.values()]
            if len(names) > 1 or not is_reward:
                yield name, " → ".join(score.with_count for score in scores)
        best, last = self.best_version, self.last_version
        if best is not None:
            untrained = "" if best.number else ", the base model: no trained version has done better"
            yield "best version", f"v{best.number}{untrained or _location(best)}"
        if last is not None:
            base = "" if last.number else ", the base model: nothing was trained"
            yield "last version", f"v{last.number}{base or _location(last)}"
        if not self.is_measured:
            version_suffix = "" if last is None else f" of v{last.number}"
            how = "" if validated else f": no validation of held-out examples ({VALIDATION_KEY}) was run"
            yield "not measured", f"nothing was measured after the last update{version_suffix}{how}"

    def as_json(self) -> dict[str, Any]:
        """Return the summary as `etude runs show --json` has it."""
        return self.model_dump(mode="json", exclude=None if self.targets else {"targets"})


def summarize(history: History, num_epochs: int | None = None) -> Summary:
    """Return the summary of one model's training, which was asked to last `num_epochs`."""
    start, trained, scored = history.validation(0), history.trained_epochs, with_rewards(history.validations)
    measured = {"before": start} if history.warm_up is None else {"before": history.base, "warm": start}
    epochs = [entry for entry in history.epochs if entry.resting is None]
    measured["after"] = next((entry for entry in reversed(history.validations) if entry.epoch), None)
    ends = {"first_epoch": epochs[:1], "last_epoch": epochs[1:][-1:]}
    return Summary(
        run_id=history.run_id,
        epochs_trained=len(trained),
        epochs_skipped=sum(entry.skipped is not None for entry in history.epochs),
        measured_on=VALIDATION if history.validations else TRAINING,
        warm_up=None if history.warm_up is None else WarmUpFigure.from_entry(history.warm_up),
        **{key: Figure.from_entry(entry) for key, entry in measured.items() if entry is not None},
        **{key: Figure.from_entry(entry) for key, entries in ends.items() for entry in entries},
        is_measured=not trained or any(entry.epoch >= trained[-1].epoch for entry in scored),
        best_version=best_version(history),
        last_version=last_version(history),
        warnings=alarm_sentences(history),
        stopped=stopped_by(history, num_epochs),
    )


def summary_in(by_target: Mapping[str | None, History], run_id: str, num_epochs: int | None) -> Summary:
    """Return the summary of a run: of its one model, or of each target and all of them together."""
    if None in by_target:
        return summarize(by_target[None], num_epochs)
    targets = {str(name): summarize(history, num_epochs) for name, history in by_target.items()}
    trained = {entry.epoch for history in by_target.values() for entry in history.trained_epochs}
    skipped = {entry.epoch for history in by_target.values() for entry in history.epochs} - trained
    summaries = targets.items()
    return Summary(
        run_id=run_id,
        epochs_trained=len(trained),
        epochs_skipped=len(skipped),
        measured_on=VALIDATION if any(each.measured_on == VALIDATION for _, each in summaries) else TRAINING,
        is_measured=all(each.is_measured for each in targets.values()),
        warnings=[f"{name}: {text}" for name, each in summaries for text in each.warnings],
        stopped=next((f"{name}: {each.stopped}" for name, each in summaries if each.stopped), None),
        targets=targets,
    )


def alarm_sentences(history: History) -> list[str]:
    """Return for each alarm its latest text, and how many other entries it holds for; without failures."""
    kinds: tuple[Sequence[Entry], ...] = (history.epochs, history.validations)
    texts = []
    for entries in kinds:
        held: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for entry in entries:
            for event in entry.alarms:
                if event.alarm != "failures":
                    held.setdefault(event.key, []).append((str(entry), event.text))
        for sentences in held.values():
            (name, text), more = sentences[-1], len(sentences) - 1
            texts.append(f"{name}{f' (and {more} more)' if more else ''}: {text}")
    return texts


def stopped_by(history: History, num_epochs: int | None) -> str | None:
    """Return why an alarm ended the run early, or None. Only alarms of the last epoch count.

    A run that has done `num_epochs` did not end early.
    """
    last = max((entry.epoch for entry in history.epochs), default=0)
    if num_epochs is not None and last >= num_epochs:
        return None
    texts = (
        f"{entry}: {event.text}"
        for entry in history.entries
        if entry.epoch == last
        for event in entry.alarms
        if event.action == "stop"
    )
    return next(texts, None)


def causes_in(entries: Iterable[Entry]) -> list[FailureCause]:
    """Return the causes of all failures in the entries, added up, the most frequent first."""
    return merge_causes(cause for entry in entries for cause in entry.causes)


def show_command(run: Path | str, episode: str) -> str:
    """Return the command that shows an episode."""
    return shlex.join(["etude", "episodes", "show", episode, "--run", str(run)])
