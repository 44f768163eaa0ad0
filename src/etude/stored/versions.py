"""Which version of a run's model is meant: `RUN`, `RUN:v3`, `RUN:best`, `RUN:last`, `RUN:base`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from etude.core.errors import RequestError
from etude.core.history import History
from etude.core.job import ModelVersion
from etude.epochs.versions import best_version, last_version
from etude.stored.facts import history_of
from etude.stored.find import find_run, is_run

BEST, LAST, BASE = "best", "last", "base"

_NUMBER = re.compile(r"v?(\d+)")


@dataclass(frozen=True, slots=True)
class RunVersion:
    """One version of the model that a run trains."""

    run: Path
    version: ModelVersion | None
    """None for the base model."""

    @property
    def number(self) -> int:
        """0 for the base model."""
        return 0 if self.version is None else self.version.number

    def __str__(self) -> str:
        return f"{self.run.name}:{f'v{self.number}' if self.number else BASE}"


def run_version(text: str, root: Path) -> RunVersion | None:
    """The version that `RUN` or `RUN:version` names; None when `RUN` is no run, as in `Qwen/Qwen3-0.6B`.

    Raises RequestError when the run has no such version.
    """
    name, colon, wish = text.rpartition(":")
    if colon and (is_run(Path(name)) or is_run(root / name)):
        return choose_version(find_run(name, root), wish)
    if is_run(Path(text)) or is_run(root / text):
        return choose_version(find_run(text, root), BEST)
    return None


def choose_version(run: Path, wish: str = BEST) -> RunVersion:
    """`best` is the one with the best validation, or the last one without validations.

    Raises RequestError when there is no such version, or its weights were deleted.
    """
    history = history_of(run)
    known = {
        entry.version.number: entry.version
        for entry in history.epochs
        if entry.version is not None and entry.version.number
    }
    if wish in (BASE, "v0", "0"):
        return RunVersion(run, None)
    if wish in (BEST, LAST):
        return RunVersion(run, _best_or_last(wish, history, run))
    match = _NUMBER.fullmatch(wish)
    number = int(match[1]) if match else None
    if number is None:
        raise RequestError(
            f"'{wish}' is no version; write {BEST}, {LAST}, {BASE}, or a number: {_listed(known)}"
        )
    if number not in known:
        raise RequestError(f"run {run.name} has no version v{number}; it has {_listed(known)}")
    require_kept(run, known[number])
    return RunVersion(run, known[number])


def require_kept(run: Path, version: ModelVersion) -> None:
    """Raise RequestError when the weights of a version that was stored here have been deleted."""
    folder = stored_at(run, version)
    if folder is not None and not folder.is_dir():
        kept = [int(path.name[1:]) for path in folder.parent.glob("v*") if path.name[1:].isdigit()]
        raise RequestError(
            f"the weights of v{version.number} of run {run.name} were not kept; there are {_listed(kept)}. "
            "`keep_checkpoints` of the trainer says how many are kept"
        )


def stored_at(run: Path, version: ModelVersion) -> Path | None:
    """Where the run folder has the weights of a version; None when they are a backend's."""
    parts = Path(version.location).parts
    if "checkpoints" not in parts:
        return None
    # By the folder as it is now: a run may have been moved since.
    return run.joinpath(*parts[len(parts) - 1 - parts[::-1].index("checkpoints") :])


def _best_or_last(wish: str, history: History, run: Path) -> ModelVersion | None:
    version = best_version(history) if wish == BEST else last_version(history)
    if version is None:
        raise RequestError(
            f"run {run.name} has no trained version yet; `etude resume {run}` goes on with it, and "
            f"{run.name}:{BASE} is the model that it started from"
        )
    if version.number:
        require_kept(run, version)
        return version
    return None


def _listed(numbers: object) -> str:
    return ", ".join(f"v{number}" for number in sorted(numbers)) or "none"  # type: ignore[call-overload]
