"""The content of jobs, which tells them apart, and numbered folders with all that training needs to go on."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.core.edge import TrajectoryCollection, trajectory_of
from etude.core.errors import RequestError, StoreError
from etude.core.job import ModelVersion
from etude.core.keys import content_hash
from etude.store.files import SET_ASIDE, WEIGHTS_FILE, damage_in, note_sum, put_in_place, require_as_written

if TYPE_CHECKING:
    from etude.learner.learner import Learner
    from etude.learner.snapshot import Snapshot


class JobNameTakenError(RequestError):
    """There is a job of that name, and it is another job. Nothing was submitted."""

    def __init__(self, name: str, differences: list[str]) -> None:
        super().__init__(
            f"there is a job named {name!r} already, and it is another one: it has {', '.join(differences)}. "
            "Nothing was submitted; give this job another name, or resume the run with the settings it had"
        )
        self.name, self.differences = name, differences


@dataclass(frozen=True, slots=True)
class JobContent:
    """The parts that a job is made of; one is None where nobody knows it any more.

    A name stands for one job only while both are the same.
    """

    data: str | None
    """Hash of what it trains on."""
    method: str | None
    hyperparameters: str | None
    """Hash of them, the seed included."""
    start: str | None = None
    """The model that it starts from, by the backend's name; None where that is not to be compared."""

    @classmethod
    def of(cls, data: str, method: str, hyperparameters: Any, start: str | None = None) -> JobContent:
        """The content of a job with JSON-able hyperparameters."""
        return cls(data, method, content_hash(hyperparameters), start)

    def require(self, name: str, asked: JobContent, made: str | None = None) -> None:
        """Raise JobNameTakenError, saying what differs, unless `asked` is this job.

        `made` is the model that this job made: who has gone on from it may still ask for the job.
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
    """A hash of the data as trajectories, whatever the collection is called; 32 hexadecimal digits."""
    digest = hashlib.blake2b(collection.method.encode(), digest_size=16)
    for group in collection.groups:
        digest.update(b"\n[")
        for trajectory in map(trajectory_of, group):
            digest.update(trajectory.model_dump_json().encode() + b"\n")
    return digest.hexdigest()


_FACTS = "job.json"
_DRAFT = ".part"


class StateFolders:
    """Folders `v1`, `v2` or `step-10`, `step-20`: weights, optimiser and facts, whole or not there at all.

    Each has the digests of its files, and is read only as it was written.
    """

    def __init__(self, root: Path, prefix: str, noun: str) -> None:
        """`noun` is what errors call a folder: a version, a checkpoint."""
        self.root = root
        self._prefix = prefix
        self._noun = noun

    def folder(self, number: int) -> Path:
        """Where a number is, or would be."""
        return self.root / f"{self._prefix}{number}"

    def numbers(self) -> list[int]:
        """The numbers that are there, in their order."""
        tails = [path.name[len(self._prefix) :] for path in self.root.glob(f"{self._prefix}*")]
        return sorted(int(tail) for tail in tails if tail.isdecimal())

    def newest(self) -> int:
        """The highest number that is there; 0 when there is none."""
        return max(self.numbers(), default=0)

    def damage(self, number: int) -> list[str]:
        """How a folder differs from what was written, a clause for each file; nothing where it is whole."""
        return damage_in(self.folder(number))

    def newest_whole(self) -> tuple[int, list[str]]:
        """The highest number whose folder is whole, 0 without one, and the damage of those above it."""
        damage: list[str] = []
        for number in reversed(self.numbers()):
            if not (clauses := self.damage(number)):
                return number, damage
            damage += clauses
        return 0, damage

    def write(self, number: int, facts: Mapping[str, Any], state: Snapshot) -> ModelVersion:
        """Save a learner's state and JSON-able facts. Raises StoreError.

        It is on the disk when this returns.
        """
        final = self.folder(number)
        draft = final.with_name(final.name + _DRAFT)
        try:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True, exist_ok=True)
            version = ModelVersion(number=number, location=str(final), digest=state.save(draft))
            content = {**facts, "version": version.model_dump(mode="json")}
            (draft / _FACTS).write_text(json.dumps(content, indent=2), encoding="utf-8")
            note_sum(draft / _FACTS)
            put_in_place(draft, final)
        except (OSError, StoreError) as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise StoreError(
                f"cannot save {self._noun} {number} in {final}: {error}; free some space and resume "
                "(`etude resume`), or make the job again"
            ) from error
        return version

    def facts(self, number: int) -> dict[str, Any]:
        """The facts that were saved under a number. Raises StoreError when they are not as they were."""
        path = self.folder(number) / _FACTS
        require_as_written(path)
        try:
            facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StoreError(f"{path} cannot be read: {error}") from error
        return facts

    def load(self, number: int, learner: Learner) -> dict[str, Any]:
        """Put weights and optimiser back to where they were; the facts of that time. Raises StoreError."""
        from etude.models.weights import load_tensors

        folder = self.folder(number)
        learner.policy.load_tensors(load_tensors(folder / WEIGHTS_FILE))
        learner.restore(folder)
        return self.facts(number)

    def prune(self, keep: Collection[int]) -> None:
        """Delete every folder whose number is not in `keep`."""
        for number in self.numbers():
            if number not in keep:
                # First out of the way: a folder must never be there in part.
                draft = self.folder(number).with_name(f"{self._prefix}{number}{_DRAFT}")
                shutil.rmtree(draft, ignore_errors=True)
                self.folder(number).rename(draft)
                shutil.rmtree(draft, ignore_errors=True)

    def set_aside(self, number: int) -> Path | None:
        """Give a folder a name that has no number; where it is now, None where there was none.

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

    def delete_drafts(self) -> None:
        """Delete what killed processes left half done."""
        for path in self.root.glob(f"{self._prefix}*{_DRAFT}"):
            shutil.rmtree(path, ignore_errors=True)
