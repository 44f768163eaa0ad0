"""The content that identifies a job, and numbered folders with the state to resume training from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from etude.core.conversion import TrajectoryCollection
from etude.core.errors import RequestError, StoreError
from etude.core.job import ModelVersion
from etude.store.files import SET_ASIDE, damage_in, delete_folder, note_sum, open_draft, require_as_written

if TYPE_CHECKING:
    from etude.learner.optimiser import Snapshot


class JobNameTakenError(RequestError):
    """A job of that name exists and is a different job. Nothing was submitted."""

    def __init__(self, name: str, differences: list[str]) -> None:
        super().__init__(
            f"there is already another job named {name!r}: it has {', '.join(differences)}. "
            "Nothing was submitted; give this job another name, or resume the run with the settings it had"
        )
        self.name, self.differences = name, differences


@dataclass(frozen=True, slots=True)
class JobContent:
    """The parts that define a job. A part is None if it is no longer known.

    A job's name must not be reused with other content.
    """

    data: str | None
    """Hash of the training data."""
    method: str | None
    hyperparameters: str | None
    """Hash of the hyperparameters, including the seed."""
    start: str | None = None
    """The backend's name of the start model. None skips its comparison."""

    def require(self, name: str, asked: JobContent, made: str | None = None) -> None:
        """Raise JobNameTakenError, with the differences, unless `asked` is this job.

        `made` is the model that this job made. A caller that has continued from it may still ask for the job.
        """
        differences = []
        if asked.data != self.data:
            differences.append("other data")
        if asked.method != self.method:
            differences.append(f"another method ({self.method or 'unknown'}, and not {asked.method})")
        elif asked.hyperparameters != self.hyperparameters:
            differences.append("other hyperparameters")
        if asked.start is not None and asked.start not in (self.start, made):
            differences.append(f"another start model ({self.start or 'unknown'}, and not {asked.start})")
        if differences:
            raise JobNameTakenError(name, differences)


def data_hash(collection: TrajectoryCollection) -> str:
    """Hash the data, regardless of the collection's name. Returns 32 hexadecimal digits."""
    digest = hashlib.blake2b(collection.method.encode(), digest_size=16)
    for group in collection.groups:
        digest.update(b"\n[")
        for unit in group:
            digest.update(to_json(unit, fallback=float, inf_nan_mode="constants") + b"\n")
    return digest.hexdigest()


_FACTS = "job.json"


class StateFolders:
    """Folders `v1`, `v2` or `step-10`, `step-20` of weights, optimiser and facts, complete or absent.

    Each contains the digests of its files, and is read only if they match.
    """

    def __init__(self, root: Path, prefix: str, noun: str) -> None:
        """`noun` is the word for a folder in errors: version or checkpoint."""
        self.root = root
        self._prefix = prefix
        self._noun = noun

    def folder(self, number: int) -> Path:
        """Return the folder's path for a number, whether or not it exists."""
        return self.root / f"{self._prefix}{number}"

    def numbers(self) -> list[int]:
        """Return the existing numbers in ascending order."""
        tails = [path.name[len(self._prefix) :] for path in self.root.glob(f"{self._prefix}*")]
        return sorted(int(tail) for tail in tails if tail.isdecimal())

    def newest(self) -> int:
        """Return the highest existing number, or 0."""
        return max(self.numbers(), default=0)

    def damage(self, number: int) -> list[str]:
        """Return how a folder differs from the written one, one clause per file. Empty if it is undamaged."""
        return damage_in(self.folder(number))

    def write(self, number: int, facts: Mapping[str, Any], state: Snapshot) -> ModelVersion:
        """Save a learner's state and JSON-able facts. Raises StoreError.

        They are on disk when this returns.
        """
        final = self.folder(number)
        try:
            with open_draft(final) as draft:
                draft.mkdir()
                version = ModelVersion(number=number, location=str(final), digest=state.save(draft))
                content = {**facts, "version": version.model_dump(mode="json")}
                (draft / _FACTS).write_text(json.dumps(content, indent=2), encoding="utf-8")
                note_sum(draft / _FACTS)
        except StoreError as error:
            what = f"cannot save {self._noun} {number}"
            raise StoreError(f"{what}: {error}; free some space and resume") from error
        return version

    def facts(self, number: int) -> dict[str, Any]:
        """Return the facts saved under a number. Raises StoreError if they are damaged."""
        path = self.folder(number) / _FACTS
        require_as_written(path)
        try:
            facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StoreError(f"{path} cannot be read: {error}") from error
        return facts

    def prune(self, keep: Collection[int]) -> None:
        """Delete every folder whose number is not in `keep`."""
        for number in self.numbers():
            if number not in keep:
                delete_folder(self.folder(number))

    def set_aside(self, number: int) -> Path | None:
        """Rename a folder so that it has no number. Return its new path, or None if it did not exist.

        Raises StoreError.
        """
        folder = self.folder(number)
        if not folder.exists():
            return None
        names = (f"{folder.name}{SET_ASIDE}{copy}" for copy in count(1))
        aside = next(folder.with_name(name) for name in names if not folder.with_name(name).exists())
        try:
            folder.rename(aside)
        except OSError as error:
            raise StoreError(f"{folder} cannot be set aside: {error.strerror}") from error
        return aside
