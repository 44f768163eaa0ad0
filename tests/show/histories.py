"""Histories written by hand."""

from __future__ import annotations

from etude.core.history import EpochEntry, History, ValidationEntry
from etude.core.job import ModelVersion

NOW = "2026-01-02T03:04:05+00:00"


def version(number: int) -> ModelVersion:
    return ModelVersion(number=number, location=f"checkpoints/v{number}", digest=f"digest-{number}")


def epoch(number: int, reward: float | None, *, skipped: str | None = None, **metrics: object) -> EpochEntry:
    """The epoch after `number` others."""
    return EpochEntry(
        epoch=number + 1,
        timestamp=NOW,
        metrics={"avg_reward": reward, "num_trajectories": 8, **metrics},
        skipped=skipped,
        sampled_from=version(number),
        version=version(number if skipped else number + 1),
    )


def validation(number: int, reward: float | None, **metrics: object) -> ValidationEntry:
    return ValidationEntry(
        epoch=number,
        timestamp=NOW,
        metrics={"avg_reward": reward, "num_examples": 10, **metrics},
        version=version(number),
    )


def history(rewards: list[float | None], validations: dict[int, float | None] | None = None) -> History:
    return History(
        run_id="run",
        epochs=tuple(epoch(number, reward) for number, reward in enumerate(rewards)),
        validations=tuple(validation(number, reward) for number, reward in (validations or {}).items()),
    )
