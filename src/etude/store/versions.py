"""Names of versions of a run's model: `RUN`, `RUN:v3`, `RUN:best`, `RUN:last`, `RUN:base`, and `RUN:warm-up`
after a warm-up.

In a run that trains several models, the name has the target too: `RUN:verifier`, `RUN:verifier:v3`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from etude.core.errors import RequestError
from etude.core.history import History
from etude.core.job import ModelVersion
from etude.store.facts import find_run, is_run, read_facts
from etude.store.figures import best_version, last_version
from etude.store.log import read_histories

BEST, LAST, BASE, WARM_UP = "best", "last", "base", "warm-up"

_NUMBER = re.compile(r"v?\d+")


@dataclass(frozen=True, slots=True)
class RunVersion:
    """One version of a model that a run trains."""

    run: Path
    version: ModelVersion | None
    """None for the base model."""
    target: str | None = None
    """The target that the version is from, in a run that trains several models."""
    choice: str = field(default="", compare=False)
    """Why this version was chosen, if none was named."""

    @property
    def number(self) -> int:
        """The number of the version; 0 is the base model."""
        return 0 if self.version is None else self.version.number

    @property
    def folder(self) -> Path | None:
        """The folder of its weights in the run folder. None for the base model and a backend's weights."""
        return None if self.version is None else stored_at(self.run, self.version)

    def __str__(self) -> str:
        whose = "" if self.target is None else f"{self.target}:"
        return f"{self.run.name}:{whose}{f'v{self.number}' if self.number else BASE}"


def run_version(text: str, root: Path) -> RunVersion | None:
    """Return the version that `RUN` or `RUN:version` names, or None if there is no such run.

    Raises RequestError when the run has no such version.
    """
    parts = text.split(":")
    for count in range(len(parts), 0, -1):
        name, wish = ":".join(parts[:count]), ":".join(parts[count:])
        if is_run(Path(name)) or is_run(root / name):
            return choose_version(find_run(name, root), wish)
    return None


def choose_version(run: Path, wish: str = "") -> RunVersion:
    """Return the version of a run that `wish` names.

    `best` is the version with the best validation. An empty wish means the best version if one was measured
    after training, else the last. Raises RequestError when there is no such version, or its weights are not
    on the disk.
    """
    histories, target, wish = read_histories(run), None, str(wish)
    if None not in histories:
        target, _, wish = wish.partition(":")
    if target not in histories:
        ends = {name: LAST if best_version(own) is None else BEST for name, own in histories.items()}
        names = ", ".join(f"{name}:{end}" for name, end in ends.items())
        raise RequestError(f"run {run.name} trains several models; name one and its version: {names}")
    history = histories[target]
    if wish in (BASE, "v0", "0"):
        return RunVersion(run, None, target)
    if wish in (BEST, LAST, ""):
        version, choice = _best_or_last(wish, history, run, target)
        return _require_version(RunVersion(run, version, target, choice))
    if wish == WARM_UP and history.start is not None:
        wish = f"v{history.start.number}"
    versions = (history.start, *(entry.version for entry in history.epochs))
    known = {version.number: version for version in versions if version is not None}
    numbers = _list_numbers(number for number in known if number)
    if _NUMBER.fullmatch(wish) is None:
        raise RequestError(f"'{wish}' is not a version; write {BEST}, {LAST}, {BASE}, or a number: {numbers}")
    version = known.get(int(wish.removeprefix("v")))
    if version is None:
        raise RequestError(f"run {run.name} has no version v{wish.removeprefix('v')}; it has {numbers}")
    return _require_version(RunVersion(run, version, target))


def _require_version(wanted: RunVersion) -> RunVersion:
    """Return the version. Raises RequestError when its weights are not on the disk."""
    if (folder := wanted.folder) is not None and not folder.exists():
        raise RequestError(
            f"the weights of v{wanted.number} of run {wanted.run.name} were not kept; there are "
            f"{_list_numbers(_kept_in(folder.parent))}. The trainer's `keep_checkpoints` says how many are "
            "kept, and the adapter's `checkpoint_seconds` how often one is written"
        )
    return wanted


def describe_kept(run: Path, history: History) -> str | None:
    """Return which trained versions are on the disk, in words. None if all are, or a backend has them."""
    made = {version.number: version for entry in history.trained if (version := entry.version) is not None}
    last = made[max(made)] if made else None
    folder = None if last is None else stored_at(run, last)
    if folder is None or made.keys() <= set(kept := _kept_in(folder.parent)):
        return None
    return f"{_list_numbers(number for number in kept if number in made)} of {len(made)} versions"


def _kept_in(folder: Path) -> list[int]:
    return [int(path.name[1:]) for path in folder.glob("v*") if path.name[1:].isdigit()]


def stored_at(run: Path, version: ModelVersion) -> Path | None:
    """Return the folder of a version's weights in the run folder, or None if a backend has them."""
    parts = Path(version.location).parts
    if "checkpoints" not in parts:
        return None
    # Relative to the folder as it is now, because the run may have been moved.
    return run.joinpath(*parts[len(parts) - 1 - parts[::-1].index("checkpoints") :])


def is_hosted(run: Path, version: ModelVersion | None) -> bool:
    """Return whether a backend has a version's weights, and the run folder does not."""
    return version is not None and version.number > 0 and stored_at(run, version) is None


def _best_or_last(
    wish: str, history: History, run: Path, target: str | None
) -> tuple[ModelVersion | None, str]:
    """Return the version, or None for the base model, and why it was chosen."""
    best, last = best_version(history), last_version(history)
    whose = run.name if target is None else f"{run.name}:{target}"
    if last is None:
        why = {"unfinished": f" yet; continue it: etude resume {shlex.quote(str(run))}", "running": " yet"}
        none = why.get(read_facts(run).state, ": it trained on nothing, or its backend keeps the versions")
        raise RequestError(
            f"run {whose} has no trained version{none}; {whose}:{BASE} is the model that it started from"
        )
    if wish == BEST and best is None:
        raise RequestError(
            f"run {whose} has not measured any version after training it, so the best is not known; "
            f"{whose}:{LAST} is the last one, v{last.number}. Validations of held-out "
            "examples ('finetuning.run_configuration.validation_dataset') measure them"
        )
    if wish == LAST:
        chosen, choice = last, "the last version"
    elif best is None:
        chosen, choice = last, "the last version; none was measured after it was trained"
    else:
        chosen, choice = best, "the version with the best validation"
    if not chosen.number:
        return None, f"{choice}, which is the base model: no trained version has done better"
    return chosen, choice


def _list_numbers(numbers: Iterable[int]) -> str:
    return ", ".join(f"v{number}" for number in sorted(numbers)) or "none"
