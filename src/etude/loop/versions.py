"""Which versions of the model are worth keeping."""

from __future__ import annotations

from etude.core.history import History
from etude.core.job import ModelVersion


def measured_versions(history: History) -> list[tuple[ModelVersion, float]]:
    """Versions and their rewards, oldest first.

    By validation where there was any, else by the rewards of the episodes sampled from the version.
    """
    if history.validations:
        found = [(entry.version, entry.metrics.get("avg_reward")) for entry in history.validations]
    else:
        found = [(entry.sampled_from, entry.metrics.get("avg_reward")) for entry in history.epochs]
    return [
        (version, float(reward)) for version, reward in found if version is not None and reward is not None
    ]


def last_version(history: History) -> ModelVersion | None:
    """The weights after the last epoch."""
    return next((entry.version for entry in reversed(history.epochs) if entry.version is not None), None)


def best_version(history: History) -> ModelVersion | None:
    """The version with the highest validation reward, the latest of equals; the base model may be it.

    None where no version was measured after it was trained: nobody knows which is best then.
    """
    measured = measured_versions(history) if history.validations else []
    if all(version.number == 0 for version, _ in measured):
        return None
    return max(measured, key=lambda pair: (pair[1], pair[0].number))[0]


def versions_to_keep(history: History, count: int) -> list[ModelVersion]:
    """The `count` best versions and the last one, from which a run is resumed; oldest first."""
    ranked = sorted(measured_versions(history), key=lambda pair: (-pair[1], -pair[0].number))
    chosen = {version.number: version for version, _ in ranked}
    best = list(chosen.values())[:count]
    last = last_version(history)
    kept = {version.number: version for version in [*best, *([last] if last is not None else [])]}
    return [kept[number] for number in sorted(kept)]


def versions_made(history: History) -> list[int]:
    """The numbers of the versions that the epochs made, oldest first."""
    return [entry.version.number for entry in history.trained if entry.version is not None]
