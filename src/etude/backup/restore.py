"""A run folder made from its backup on another machine: every digest is checked, and the run taken over."""

from __future__ import annotations

import shlex
import shutil
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from etude.backup.address import Address, Content, address_of_run
from etude.backup.changes import note_changes, rebuild
from etude.backup.files import STAGE
from etude.backup.manifest import (
    Head,
    Manifest,
    StoredObject,
    Superseded,
    decode,
    name_of,
    newest,
    publish,
    shown_time,
)
from etude.core.errors import RequestError, StoreError
from etude.store.database import DATABASE, open_database
from etude.store.files import draft_of

RESTORED = "storage/restored/"
"""Keys of the journal under which a run keeps from which backups it was restored."""
_COUNTS = {
    "calls": "SELECT COUNT(*) FROM steps WHERE key LIKE '%/call/%'",
    "episodes": """SELECT COUNT(*) FROM steps WHERE value LIKE '{"episode":%'""",
}


@dataclass(frozen=True, slots=True)
class Restored:
    """A run that came back, and as much as is known of what did not."""

    run: Path
    address: str
    backup: int
    """The number of the backup."""
    head: str
    """Whose it was."""
    taken: float
    """Everything that was committed until then is here; Unix seconds."""
    entries: int
    calls: int
    episodes: int
    files: int
    bytes: int
    seconds: float
    """It took so long to fetch and verify it."""
    interval: float
    """Seconds between backups, as the run was configured."""
    entries_per_second: float | None
    """How fast the journal grew between the last two backups; None where there is one alone."""

    def as_json(self) -> dict[str, Any]:
        """The facts as JSON."""
        return {**asdict(self), "run": str(self.run)}

    def lines(self) -> list[str]:
        """The facts in sentences."""
        pace = self.entries_per_second
        grew = "" if pace is None else f"; its journal grew by {pace:.1f} entries a second before that"
        return [
            f"restored {self.run} from backup {self.backup} at {self.address}: {self.entries} entries "
            f"({self.episodes} episodes, {self.calls} calls) and {self.files} files, "
            f"{self.bytes / 1e6:.1f} MB, all digests right, in {self.seconds:.1f} s",
            f"it has everything that {self.head}, had done until {shown_time(self.taken)}, "
            f"{_ago(time.time() - self.taken)} ago; if that did more, it is lost and is done again. Backups "
            f"were made every {self.interval:g} s, as long as there was something new and the storage took "
            f"it{grew}",
        ]


def is_address(text: str) -> bool:
    """Whether a run is named by an address, and not by a folder or a name."""
    return "://" in text


def fetch(text: str, root: Path, options: Mapping[str, Any]) -> Restored:
    """Make the folder of the run at an address in `root`, and become its head: any other one has to stop.

    Raises RequestError when there is no run there, or a folder of its name here, StoreError, naming the
    object, for one that is missing, torn or altered. Nothing is left behind then.
    """
    _, name = address_of_run(text)
    path = (root / name).absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RequestError(
            f"{path} is there already; go on with it: etude resume {shlex.quote(str(path))}, or name another "
            "folder for runs: --output-dir"
        )
    address = Address(text.rstrip("/"), options)
    started = time.monotonic()
    with draft_of(path) as draft:
        stage = draft / STAGE
        stage.mkdir(parents=True)
        manifest, before = _took_over(address, options, stage, Head.here())
        pace = _pace(address, manifest)
        return Restored(
            run=path,
            address=address.text,
            backup=before.number,
            head=str(before.head),
            taken=manifest.taken,
            files=len(manifest.files),
            bytes=sum(stored.size for stored in manifest.objects()),
            seconds=time.monotonic() - started,
            interval=manifest.interval,
            entries_per_second=pace,
            **_built(draft, stage, manifest, address),
        )


def _took_over(
    address: Address, options: Mapping[str, Any], stage: Path, head: Head
) -> tuple[Manifest, Manifest]:
    """Fetch the newest backup, and make it this head's; its manifest, and the one that it was before."""
    try:
        while True:
            before = newest(address)
            if before is None:
                raise RequestError(f"there is no run at {address.text}{_others(address.text, options)}")
            try:
                for stored in before.objects():
                    if not (stage / stored.sha256).exists():
                        _download(address, stored, stage / stored.sha256)
                number = before.number + 1
                update = {"number": number, "lease": number, "head": head}
                manifest = before.model_copy(update=update)
                publish(address, manifest)
                return manifest, before
            except (Superseded, _Missing) as error:
                # The other head is still at work: what it has done meanwhile comes along too.
                now = newest(address)
                if now is not None and now.number == before.number:
                    raise StoreError(str(error)) from error
    except (RequestError, StoreError):
        raise
    except Exception as error:  # whatever the driver raises
        raise StoreError(f"{address.text} cannot be read: {type(error).__name__}: {error}") from error


class _Missing(StoreError):
    """An object that a manifest names is not there."""


def _download(address: Address, stored: StoredObject, path: Path) -> None:
    """Fetch an object into a file. Raises StoreError where it is not what was written."""
    where = f"{address.text}/{stored.name}"
    draft = path.with_suffix(".part")
    try:
        with draft.open("wb") as file:
            file.writelines(address.pieces(stored.name, stored.size))
    except FileNotFoundError as error:
        raise _Missing(f"{where} is missing; nothing was restored. {_ADVICE}") from error
    except Exception as error:  # whatever the driver raises, for a piece behind the end of an object too
        raise StoreError(
            f"{where} cannot be read: {type(error).__name__}: {error}. Nothing was restored. {_ADVICE}"
        ) from error
    content = Content.of_file(draft)
    if content != stored.content:
        raise StoreError(
            f"{where} is damaged: it has {content.size} bytes with SHA-256 {content.sha256}, in place of "
            f"{stored.size} with {stored.sha256}. Nothing was restored. {_ADVICE}"
        )
    draft.rename(path)


_ADVICE = (
    "Bring the object back, from a version or a copy of it that the storage keeps; or delete the newest "
    "manifest, to go on from the backup before it"
)


def _built(draft: Path, stage: Path, manifest: Manifest, address: Address) -> dict[str, int]:
    """Make the journal and place the files; how many entries, calls and episodes there are."""
    uses = Counter(stored.sha256 for stored in manifest.files.values())
    for inside, stored in manifest.files.items():
        target = draft / inside
        if ".." in target.parts or not target.is_relative_to(draft):
            raise StoreError(
                f"{address.text}/{name_of(manifest.number)} has a file outside of the run: {inside}"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        uses[stored.sha256] -= 1
        place = shutil.copyfile if uses[stored.sha256] else shutil.move
        place(stage / stored.sha256, target)
    database = draft / DATABASE
    segments = [(segment, stage / segment.object.sha256) for segment in manifest.segments]
    fact = {"from": address.text, "backup": manifest.number - 1, "taken": manifest.taken, "at": time.time()}
    entries = rebuild(database, segments, manifest.position, (f"{RESTORED}{manifest.number:08d}", fact))
    note_changes(database, manifest.head.id)
    shutil.rmtree(stage)
    with closing(open_database(database, read_only=True)) as connection:
        counts = {name: int(connection.execute(query).fetchone()[0]) for name, query in _COUNTS.items()}
    return {"entries": entries, **counts}


def _pace(address: Address, manifest: Manifest) -> float | None:
    """Entries a second between the last two backups of earlier heads; None where that is not known."""
    name = name_of(manifest.number - 2)
    try:
        earlier = decode(address.read(name), name)
    except (OSError, StoreError):
        return None
    seconds = manifest.taken - earlier.taken
    return (manifest.position - earlier.position) / seconds if seconds > 0 else None


def _others(text: str, options: Mapping[str, Any]) -> str:
    """The runs that there are below an address that is no run's, or else beside it, as a hint."""
    for parent in (text, address_of_run(text)[0]):
        address = Address(parent, options)
        runs = [name for name in address.folders() if address.names(f"{name}/manifests")]
        if runs:
            return f"; there are: {', '.join(f'{parent}/{name}' for name in runs[:5])}"
    return ""


def _ago(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} seconds"
