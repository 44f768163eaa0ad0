"""Folders of versions: `checkpoints/v3` holds what training needs to go on from version 3."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.backends.job_content import JobContent
from etude.core.errors import StoreError
from etude.core.job import ModelVersion

if TYPE_CHECKING:
    from etude.learner.learner import Learner
    from etude.models.policy import Policy

_JOB_FILE = "job.json"
_DRAFT = ".part"


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """A job and the version that it made."""

    version: ModelVersion
    metrics: dict[str, float]
    content: JobContent
    """What it was made of; its start is the number of a version."""

    def metadata(self) -> dict[str, Any]:
        """As the job's status tells it."""
        return {"model_version": self.version.model_dump(mode="json"), "metrics": self.metrics}


class VersionFolders:
    """The versions of one model, one folder each. A folder is there whole or not at all."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def folder(self, number: int) -> Path:
        """Where a version is, or would be."""
        return self._root / f"v{number}"

    def newest(self) -> int:
        """The highest number that there is; 0 when there is none."""
        return max(self._folders(), default=0)

    def here(self, version: ModelVersion) -> ModelVersion:
        """The version by the folder as it is now: a run may have been moved since it was made."""
        if not version.number:
            return version
        return version.model_copy(update={"location": str(self.folder(version.number))})

    def write(
        self,
        job: str,
        number: int,
        content: JobContent,
        metrics: dict[str, float],
        policy: Policy,
        learner: Learner,
    ) -> FinishedJob:
        """Save the weights and the optimiser in memory as a version, which is new. Raises StoreError."""
        final = self.folder(number)
        draft = final.with_suffix(_DRAFT)
        try:
            shutil.rmtree(draft, ignore_errors=True)
            version = policy.save_version(draft, number).model_copy(update={"location": str(final)})
            learner.save(draft)
            facts = {
                "job": job,
                "version": version.model_dump(mode="json"),
                "metrics": metrics,
                "content": asdict(content),
            }
            (draft / _JOB_FILE).write_text(json.dumps(facts, indent=2), encoding="utf-8")
            draft.rename(final)
        except (OSError, StoreError) as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise StoreError(
                f"cannot save version {number} in {final}: {error}; free some space and resume "
                "(`etude resume`), or make the job again"
            ) from error
        return FinishedJob(version, metrics, content)

    def of_job(self, job: str) -> FinishedJob | None:
        """The version that a job made, when it is still there."""
        for folder in self._folders().values():
            path = folder / _JOB_FILE
            try:
                facts = json.loads(path.read_text(encoding="utf-8"))
                if facts["job"] == job:
                    version = self.here(ModelVersion.model_validate(facts["version"]))
                    return FinishedJob(version, facts["metrics"], JobContent(**facts["content"]))
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise StoreError(
                    f"{path} is damaged ({error}); delete its folder and resume (`etude "
                    "resume`), or make the job again"
                ) from error
        return None

    def prune(self, keep: set[int]) -> None:
        """Delete every version that is not in `keep`."""
        for number, folder in self._folders().items():
            if number not in keep:
                # First out of the way: a version must never be there in part.
                draft = folder.with_suffix(_DRAFT)
                shutil.rmtree(draft, ignore_errors=True)
                folder.rename(draft)
                shutil.rmtree(draft, ignore_errors=True)

    def delete_drafts(self) -> None:
        """Delete what killed processes left half done."""
        for path in self._root.glob(f"v*{_DRAFT}"):
            shutil.rmtree(path, ignore_errors=True)

    def _folders(self) -> dict[int, Path]:
        """The folders of whole versions, by number."""
        names = {path.name: path for path in self._root.glob("v*")}
        return {int(name[1:]): path for name, path in names.items() if name[1:].isdecimal()}
