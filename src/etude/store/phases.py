"""The phases of a run that have episodes: `eval`, `validation/5`, `train/3`.

`train/3.2` is the second collection of its kind that was made for an epoch.
"""

from __future__ import annotations

import re

from etude.core.errors import RequestError
from etude.store.encode import is_episode
from etude.store.journal import Journal

EVALUATION = "eval"
"""The phase of `etude evaluate`."""

_PLACE = re.compile(r"(train|validation)/(\d+)([^.]*)(?:\.(\d+))?")


def phases_of(journal: Journal) -> list[str]:
    """The phases that have episodes: evaluations, then validations, then training, each latest first."""
    found = set()
    for key, value in journal.scan():
        if is_episode(value) and value["episode"] == key:
            found.add(key.removesuffix(f"/{value['example']['id']}/{value['generation']}"))
    return sorted(found, key=_latest_first)


def choose_phase(journal: Journal, wish: str | None) -> str:
    """The phase wished for, or the latest. Raises RequestError when there is none such."""
    phases = phases_of(journal)
    if not phases:
        raise RequestError(f"{journal.path} has no episodes yet")
    if wish is not None and wish not in phases:
        raise RequestError(f"there are no episodes of the phase '{wish}'; there are: {', '.join(phases)}")
    return wish or phases[0]


def epoch_of(phase: str) -> int | None:
    """The epoch, from 0, that a phase's episodes were collected for; None for those of no training."""
    match = _PLACE.fullmatch(phase)
    return int(match[2]) - 1 if match is not None and match[1] == "train" else None


def _latest_first(phase: str) -> tuple[int, int, str, int]:
    match = _PLACE.fullmatch(phase)
    if match is None:
        return (0 if phase == EVALUATION else 1, 0, phase, 0)
    return (2 if match[1] == "validation" else 3, -int(match[2]), match[3], -int(match[4] or 1))
