"""Numbered folders with all that training needs to go on: the versions of a run, the checkpoints of a job."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.core.errors import StoreError
from etude.core.job import ModelVersion
from etude.store.files import SET_ASIDE, WEIGHTS_FILE, damage_in, note_sum, put_in_place, require_as_written

if TYPE_CHECKING:
    from etude.learner.learner import Learner, Snapshot

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

    def write(self, number: int, facts: Mapping[str, Any], learner: Learner, state: Snapshot) -> ModelVersion:
        """Save `state`, which is a snapshot of the learner's, and JSON-able facts. Raises StoreError.

        It is on the disk when this returns.
        """
        final = self.folder(number)
        draft = final.with_name(final.name + _DRAFT)
        try:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True, exist_ok=True)
            # Digests and the disk take most of the time, for which the interpreter's lock is free.
            with ThreadPoolExecutor(1, thread_name_prefix="save") as beside:
                optimiser = beside.submit(learner.save, draft, state.optimiser)
                version = learner.policy.save_version(draft, number, state.weights)
            optimiser.result()
            version = version.model_copy(update={"location": str(final)})
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
