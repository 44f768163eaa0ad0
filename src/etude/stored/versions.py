"""Which version of a run's model is meant: `RUN`, `RUN:v3`, `RUN:best`, `RUN:last`, `RUN:base`.

Of a run that trains several models also which of those: `RUN:verifier`, `RUN:verifier:v3`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from etude.core.errors import RequestError
from etude.core.history import History
from etude.core.job import ModelVersion
from etude.epochs.versions import best_version, last_version
from etude.stored.facts import facts_of, histories_of
from etude.stored.find import find_run, is_run

BEST, LAST, BASE = "best", "last", "base"

_NUMBER = re.compile(r"v?(\d+)")


@dataclass(frozen=True, slots=True)
class RunVersion:
    """One version of a model that a run trains."""

    run: Path
    version: ModelVersion | None
    """None for the base model."""
    target: str | None = None
    """Whose version it is, in a run that trains several models."""

    @property
    def number(self) -> int:
        """0 for the base model."""
        return 0 if self.version is None else self.version.number

    def __str__(self) -> str:
        whose = "" if self.target is None else f"{self.target}:"
        return f"{self.run.name}:{whose}{f'v{self.number}' if self.number else BASE}"


def run_version(text: str, root: Path) -> RunVersion | None:
    """The version that `RUN` or `RUN:version` names; None when `RUN` is no run, as in `Qwen/Qwen3-0.6B`.

    Raises RequestError when the run has no such version.
    """
    parts = text.split(":")
    for count in range(len(parts), 0, -1):
        name, wish = ":".join(parts[:count]), ":".join(parts[count:])
        if is_run(Path(name)) or is_run(root / name):
            return choose_version(find_run(name, root), wish or BEST)
    return None


def choose_version(run: Path, wish: str = BEST) -> RunVersion:
    """`best` is the one with the best validation, or the last one without validations.

    Raises RequestError when there is no such version, or its weights were deleted.
    """
    histories = histories_of(run)
    target, wish = _target_in(wish, run, histories)
    history = histories[target]
    known = {
        entry.version.number: entry.version
        for entry in history.epochs
        if entry.version is not None and entry.version.number
    }
    if wish in (BASE, "v0", "0"):
        return RunVersion(run, None, target)
    if wish in (BEST, LAST):
        return RunVersion(run, _best_or_last(wish, history, run), target)
    match = _NUMBER.fullmatch(wish)
    number = int(match[1]) if match else None
    if number is None:
        raise RequestError(
            f"'{wish}' is no version; write {BEST}, {LAST}, {BASE}, or a number: {_listed(known)}"
        )
    if number not in known:
        raise RequestError(f"run {run.name} has no version v{number}; it has {_listed(known)}")
    require_kept(run, known[number])
    return RunVersion(run, known[number], target)


def _target_in(wish: str, run: Path, histories: Iterable[str | None]) -> tuple[str | None, str]:
    """The target that a wish names, and the rest of it."""
    targets = [name for name in histories if name is not None]
    if not targets:
        return None, wish
    name, _, rest = wish.partition(":")
    if name in targets:
        return name, rest or BEST
    raise RequestError(
        f"run {run.name} trains several models; say which and what version: "
        + ", ".join(f"{target}:{BEST}" for target in targets)
    )


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


def is_hosted(run: Path, version: ModelVersion | None) -> bool:
    """Whether a version's weights are a backend's, and not in the run folder."""
    return version is not None and version.number > 0 and stored_at(run, version) is None


def _best_or_last(wish: str, history: History, run: Path) -> ModelVersion | None:
    version = best_version(history) if wish == BEST else last_version(history)
    if version is None:
        raise RequestError(
            f"run {run.name} has no trained version{_why_not(run)}; {run.name}:{BASE} is the model that it "
            "started from"
        )
    if version.number:
        require_kept(run, version)
        return version
    return None


def _why_not(run: Path) -> str:
    """Whether there will be one, and how."""
    state = facts_of(run).state
    if state == "unfinished":
        return f" yet; go on with it: etude resume {shlex.quote(str(run))}"
    return " yet" if state == "running" else ": it trained on nothing, or its backend keeps the versions"


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(f"v{number}" for number in sorted(numbers)) or "none"
