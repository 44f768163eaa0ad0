"""The content of a job, beside its name: a name stands for one job only while both are the same."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from etude.core.errors import RequestError
from etude.core.keys import content_hash
from etude.core.trajectory import TrajectoryCollection


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
    """The parts that a job is made of; one is None where nobody knows it any more."""

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
    """A hash of the trajectories, whatever the collection is called; 32 hexadecimal digits."""
    digest = hashlib.blake2b(collection.method.encode(), digest_size=16)
    for group in collection.trajectories:
        digest.update(b"\n[")
        for trajectory in group:
            digest.update(trajectory.model_dump_json().encode() + b"\n")
    return digest.hexdigest()
