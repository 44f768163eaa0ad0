"""Manifests: each names everything that one backup of a run consists of, and who made it.

They have the numbers 1, 2, 3 …, and a number is given once: whoever creates it has made the backup that
counts. A head that finds the next number taken by another one has been superseded. So there is one line of
backups, however many heads believe that the run is theirs.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from etude.backup.address import Address, Content
from etude.core.errors import StoreError

FORMAT = 1
_FOLDER = "manifests"


class Superseded(StoreError):
    """Another head goes on with the run."""


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Head(_Value):
    """A process that goes on with a run."""

    id: str
    host: str
    process: int
    since: float
    """Unix seconds."""

    @classmethod
    def here(cls) -> Head:
        """This process, under a new id."""
        return cls(
            id=secrets.token_hex(16), host=socket.gethostname(), process=os.getpid(), since=time.time()
        )

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {shown_time(self.since)}"


class StoredObject(_Value):
    """An object, and the digest that its bytes must have."""

    name: str
    sha256: str
    size: int

    @property
    def content(self) -> Content:
        """Its bytes' digest and number."""
        return Content(self.sha256, self.size)


class Segment(_Value):
    """Changes of the journal, in an object."""

    after: int
    """It has the changes with higher numbers than this one."""
    until: int
    """And up to this one."""
    level: int = 0
    """How often shorter segments were merged to make it."""
    object: StoredObject


class Manifest(_Value):
    """One backup of a run: the journal up to a commit, and the files of that moment."""

    format: int = FORMAT
    run: str
    number: int
    head: Head
    lease: int
    """The number of the first manifest of this head; its objects lie in a folder of that name."""
    taken: float
    """When the journal was as it is here; Unix seconds."""
    interval: float
    """Seconds between backups, as the run was configured."""
    position: int = 0
    """How many changes the journal has seen."""
    segments: tuple[Segment, ...] = ()
    files: dict[str, StoredObject] = Field(default_factory=dict)
    """By their paths in the run folder."""

    def objects(self) -> Iterator[StoredObject]:
        """All objects that belong to the backup."""
        yield from (segment.object for segment in self.segments)
        yield from self.files.values()

    def encode(self) -> bytes:
        """The manifest as JSON with a digest of itself."""
        data = self.model_dump(mode="json")
        return json.dumps({**data, "sha256": _digest(data)}, indent=1).encode() + b"\n"


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def decode(data: bytes, name: str) -> Manifest:
    """The manifest in an object. Raises StoreError, naming it, when it is torn or was altered."""
    try:
        content = json.loads(data)
        digest = content.pop("sha256", None)
        if digest != _digest(content):
            raise ValueError("its digest is not that of its content")
        if content["format"] != FORMAT:
            raise StoreError(
                f"{name} has format {content['format']}, and this version of etude reads format {FORMAT}; "
                "use the etude that made the run"
            )
        return Manifest.model_validate(content)
    except (ValueError, KeyError, AttributeError, TypeError, ValidationError) as error:
        raise StoreError(
            f"{name} is damaged ({error}); nothing was taken from it. To go on from the backup before it, "
            "delete this object: whatever the run did between the two is done again then"
        ) from error


def numbers(address: Address) -> list[int]:
    """The numbers of the manifests that there are, in order."""
    names = (name.rpartition("/")[2].removesuffix(".json") for name in address.names(_FOLDER))
    return sorted(int(name) for name in names if name.isdecimal())


def name_of(number: int) -> str:
    """The name of a manifest."""
    return f"{_FOLDER}/{number:010d}.json"


def newest(address: Address) -> Manifest | None:
    """The newest backup; None where there is none. Raises StoreError when its manifest is damaged."""
    while known := numbers(address):
        name = name_of(known[-1])
        try:
            return decode(address.read(name), f"{address.text}/{name}")
        except FileNotFoundError:
            continue  # Deleted meanwhile, by a head that has made newer ones.
    return None


def publish(address: Address, manifest: Manifest) -> None:
    """Create the manifest, and read it back; with that the backup counts.

    Raises Superseded when another head has made a manifest of that number, or a newer one, and StoreError
    when what is stored is not what was written.
    """
    name, data = name_of(manifest.number), manifest.encode()
    try:
        address.create(name, data)
    except FileExistsError:
        if address.read(name) != data:
            last = newest(address)
            if last is None or last.head.id != manifest.head.id:
                raise superseded_by(last) from None
            # Its own: an error had come in place of the answer to an earlier try.
            raise StoreError(f"{address.text}/{name} is an earlier one of this head") from None
    if numbers(address)[-1] > manifest.number:
        # It had been deleted before this head, long asleep, could create it.
        address.delete([name])
        raise superseded_by(newest(address))
    if address.read(name) != data:
        raise StoreError(f"{address.text}/{name} is not what was written; the storage damages objects")


def superseded_by(manifest: Manifest | None) -> Superseded:
    """The error for a head whose run another one goes on with."""
    if manifest is None:
        return Superseded("the backup of this run was deleted while it went on, or replaced by another")
    return Superseded(
        f"another head goes on with run {manifest.run}: {manifest.head}. It had taken the run over by backup "
        f"{manifest.lease}; what this one did that was not backed up by then is in its own folder alone"
    )


def shown_time(seconds: float) -> str:
    """A point in time for people: `2026-03-01 17:04:05 UTC`."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
