"""The summary of a run and its warnings, as pure functions of its history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.core.episode import cut_off_share
from etude.core.evaluation import without_numbers
from etude.core.history import History, ValidationEntry, WarmUpEntry
from etude.store.figures import (
    TRAINING,
    VALIDATION,
    Entry,
    best_version,
    failed_counts,
    figure_of,
    is_measured,
    last_version,
    measured,
    name_of,
    shown_reward,
    version_of,
    with_rewards,
)
from etude.store.journal import Journal
from etude.store.log import histories

CUT_OFF_SHARE = 0.2
"""Of all answers: more that were cut off at the limit of tokens are worth a warning."""
MANY_EQUAL = 5
"""Rewards outside of [0, 1] that are all equal: as many are taken for what the model always gets."""
SHOWN_CAUSES = 3
"""Causes of failures in a warning."""


def summary_of(history: History) -> dict[str, Any]:
    """The run in numbers, as JSON.

    `warm_up` is what the model imitated first, None where it did not. `before` and `after` are the
    validations before training and after it, on the same examples; None where there was none. `first_epoch`
    and `last_epoch` are what the episodes of training got, which are sampled before the epoch's update;
    `last_epoch` is None where there is one epoch. Each is as `etude.store.figures.figure_of` makes it and
    says on what it was measured, with which version. `is_measured` says whether the last weights were
    measured after they were trained; `best_version` is the best of those that were, None where none was.
    `warnings` are sentences.
    """
    best, last = best_version(history), last_version(history)
    before = [figure_of(entry) for entry in history.validations if entry.epoch == 0]
    after = [figure_of(entry) for entry in history.validations if entry.epoch > 0]
    epochs = [figure_of(entry) for entry in history.epochs if entry.resting is None]
    return {
        "run_id": history.run_id,
        "epochs_trained": len(history.trained),
        "epochs_skipped": len(history.skipped),
        "skip_reasons": sorted({entry.skipped for entry in history.skipped if entry.skipped is not None}),
        "measured_on": VALIDATION if history.validations else TRAINING,
        "warm_up": None if history.warm_up is None else warm_up_of(history.warm_up),
        "opponents": opponents_of(history),
        "before": before[0] if before else None,
        "after": after[-1] if after else None,
        "first_epoch": epochs[0] if epochs else None,
        "last_epoch": epochs[-1] if len(epochs) > 1 else None,
        "is_measured": is_measured(history),
        "best_version": None if best is None else best.model_dump(mode="json"),
        "last_version": None if last is None else last.model_dump(mode="json"),
        "warnings": warnings_of(history),
    }


def opponents_of(history: History) -> dict[str, Any] | None:
    """By entry of `llms`: the ratings of all versions that played, after the last epoch, and how many games
    they rest on. None where no earlier version was met."""
    by_entry: dict[str, Any] = {}
    for entry in history.epochs:
        for name, figures in (entry.metrics.get("opponents") or {}).items():
            games = by_entry.get(name, {}).get("games", 0) + sum(row[2] for row in figures["games"])
            by_entry[name] = {"ratings": figures["ratings"], "games": games}
    return by_entry or None


def warm_up_of(entry: WarmUpEntry) -> dict[str, Any]:
    """A warm-up in numbers, as JSON; its reward, where that was measured, is of training examples."""
    rewards = {key: entry.metrics.get(key) for key in ("avg_reward", "reward_low", "reward_high")}
    return {
        "steps": entry.steps,
        "seconds": entry.seconds,
        "version": None if entry.version is None else entry.version.number,
        "loss": entry.metrics.get("loss"),
        "n": entry.metrics.get("num_scored"),
        **rewards,
    }


def summary_in(journal: Journal, run_id: str) -> dict[str, Any]:
    """The run that a journal is of, in numbers: `summary_of`, or of several targets `summary_of_targets`."""
    by_target = histories(journal, run_id)
    targets = {name: history for name, history in by_target.items() if name is not None}
    return summary_of_targets(run_id, targets) if targets else summary_of(by_target[None])


def summary_of_targets(run_id: str, histories: Mapping[str, History]) -> dict[str, Any]:
    """A run of several targets in numbers, as JSON: each one's `summary_of` under `targets`.

    An epoch counts as trained when any of them was trained in it. Figures and versions are each target's
    own.
    """
    trained = {entry.epoch for history in histories.values() for entry in history.trained}
    skipped = {entry.epoch for history in histories.values() for entry in history.epochs} - trained
    reasons = {entry.skipped for history in histories.values() for entry in history.skipped if entry.skipped}
    validated = any(history.validations for history in histories.values())
    return {
        "run_id": run_id,
        "epochs_trained": len(trained),
        "epochs_skipped": len(skipped),
        "skip_reasons": sorted(reasons),
        "measured_on": VALIDATION if validated else TRAINING,
        **dict.fromkeys(("before", "after", "first_epoch", "last_epoch", "best_version", "last_version")),
        "is_measured": all(is_measured(history) for history in histories.values()),
        "warnings": [
            f"{name}: {text}" for name, history in histories.items() for text in warnings_of(history)
        ],
        "targets": {name: summary_of(history) for name, history in histories.items()},
    }


def new_warnings(entries: Sequence[Entry], run: Path) -> list[str]:
    """The warnings that hold for the last entry, and did not hold for the one before it."""
    if not entries:
        return []
    entry, earlier = entries[-1], entries[:-1]
    collapse = collapse_of(entries)
    texts = [] if collapse is None or collapse_of(earlier) is not None else [collapse]
    texts += [
        f"{name_of(entry)}: {text}"
        for say in (_flat, _cut_off)
        if (text := say(entry)) is not None and not (earlier and say(earlier[-1]))
    ]
    known = {_cause_key(cause) for cause in causes_in(earlier[-1:])}
    causes = causes_in([entry])
    if any(_cause_key(cause) not in known for cause in causes):
        texts.append(
            f"{name_of(entry)}: {_failures(entry, causes)}. One of them: {show_command(run, causes[0])}"
        )
    return texts


def warnings_of(history: History) -> list[str]:
    """The warnings of a run: of its end, and of the epochs in which something was odd."""
    collapse = collapse_in(history)
    texts = [] if collapse is None else [collapse]
    for say in (_flat, _cut_off):
        texts += _by_entry(history.epochs, say) + _by_entry(history.validations, say)
    return texts


def collapse_in(history: History) -> str | None:
    """That a run's reward has collapsed: in validation where there is any, else in the training episodes."""
    return collapse_of(history.validations or history.epochs)


def collapse_of(entries: Sequence[Entry]) -> str | None:
    """That the last reward is surely below the first, in one sentence: their intervals do not touch."""
    known = with_rewards(entries)
    if len(known) < 2:
        return None
    first, last = known[0], known[-1]
    high, low = _bound(last, "reward_high"), _bound(first, "reward_low")
    if high is None or low is None or high >= low:
        return None
    start, end = (f"{shown_reward(entry.metrics)} ({measured(entry)})" for entry in (first, last))
    return (
        f"the reward has collapsed to {end} from {start}: {_meaning(first, last)}; "
        "a lower learning rate may help"
    )


def _meaning(first: Entry, last: Entry) -> str:
    """The meaning of a collapse: less certain where something else than the model has changed too."""
    before, after = version_of(first), version_of(last)
    model = "the model" if after is None else f"v{after}"
    start = f"v{before}" if before else "the model that training began with"
    if "target" in last.metrics:
        return f"{model} may be worse than {start}, or the others have got better"
    if isinstance(last, ValidationEntry):
        return f"{model} is worse than {start}"
    return f"{model} may be worse than {start}, or the examples of the epoch harder"


def causes_in(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    """The causes of all failures in the entries, added up, the most frequent first.

    Each has its `kind`, `reason`, `count`, and the first `episode` that it was met in.
    """
    counts: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], Mapping[str, Any]] = {}
    for entry in entries:
        for cause in entry.metrics.get("failure_causes") or ():
            counts[_cause_key(cause)] += cause["count"]
            first.setdefault(_cause_key(cause), cause)
    return [{**first[key], "count": count} for key, count in counts.most_common()]


def show_command(run: Path | str, cause: Mapping[str, Any]) -> str:
    """The command that shows the first episode of a cause."""
    return f"etude transcripts {run} --episode {cause['episode']}"


def shown_cause(cause: Mapping[str, Any]) -> str:
    """A cause with its count, in one line."""
    return f"{cause['count']} × {cause['kind']}: {cause['reason']}"


def _failures(entry: Entry, causes: Sequence[Mapping[str, Any]]) -> str:
    episodes, scores = failed_counts(entry.metrics)
    counts = [f"{episodes} episodes"] * bool(episodes) + [f"{scores} scores"] * bool(scores)
    more = sum(cause["count"] for cause in causes[SHOWN_CAUSES:])
    shown = "; ".join(map(shown_cause, causes[:SHOWN_CAUSES])) + (f"; {more} of other causes" if more else "")
    return f"{' and '.join(counts)} failed: {shown}"


def _flat(entry: Entry) -> str | None:
    groups = entry.metrics.get("reward_groups") or {}
    if not groups.get("compared") or groups["flat"] < groups["compared"]:
        return None
    return (
        f"within each of the {groups['compared']} groups all rewards are equal, so there is nothing to learn "
        "from comparing them"
    )


def _cut_off(entry: Entry) -> str | None:
    return cut_off_in(entry.metrics.get("calls") or {})


def cut_off_in(calls: Mapping[str, int]) -> str | None:
    """That many answers were cut off, in one sentence; `calls` are those of an evaluation run's output."""
    share = cut_off_share(calls)
    if share is None or share <= CUT_OFF_SHARE:
        return None
    return (
        f"{calls['cut_off']} of {calls['answers']} answers ({100 * share:.0f} %) were cut off at the limit "
        "of tokens; raise the model's max_tokens, or have it answer in fewer words"
    )


def _by_entry(entries: Sequence[Entry], say: Callable[[Entry], str | None]) -> list[str]:
    """The warning that `say` gives of the last entry it holds for, with how many others there are."""
    concerned = [entry for entry in entries if say(entry) is not None]
    if not concerned:
        return []
    more = len(concerned) - 1
    others = "" if not more else f" (and {more} other)" if more == 1 else f" (and {more} others)"
    return [f"{name_of(concerned[-1])}{others}: {say(concerned[-1])}"]


def _cause_key(cause: Mapping[str, Any]) -> tuple[str, str]:
    return cause["kind"], without_numbers(cause["reason"])


def _bound(entry: Entry, key: str) -> float | None:
    """A bound of the reward's interval; of many equal rewards, which have none, the reward itself."""
    metrics = entry.metrics
    bound = metrics.get(key)
    if bound is None and (metrics.get("num_scored") or 0) >= MANY_EQUAL:
        bound = metrics["avg_reward"]
    return bound
