"""One backup after another: what is new goes to the address, and then a manifest that names all of it."""

from __future__ import annotations

import time
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from etude.backup.address import Address, Content
from etude.backup.changes import (
    SegmentFile,
    Snapshot,
    kept_segments,
    note_changes,
    snapshot,
)
from etude.backup.files import Identity, Stage, listing
from etude.backup.manifest import (
    Head,
    Manifest,
    Segment,
    StoredObject,
    Superseded,
    name_of,
    newest,
    numbers,
    publish,
    superseded_by,
)
from etude.core.errors import RequestError, StoreError
from etude.store.database import DATABASE

_OBJECTS = "objects"
_TRIES = 20
_PAUSE_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class _Moment:
    """The run at one moment."""

    snapshot: Snapshot
    files: dict[str, Identity]
    held: dict[str, Path]


class BackupWriter:
    """Makes the backups of one run folder, as one of its heads."""

    def __init__(self, run: Path, address: Address, interval: float) -> None:
        self.last: Manifest | None = None
        """The newest backup that this head knows to be whole."""
        self.bytes_written = 0
        self._run = run
        self._database = run / DATABASE
        self._address = address
        self._interval = interval
        self._head = Head.here()
        self._lease = 0
        self.is_new = False
        """Whether no head has backed this folder up before, once that is known."""
        self._is_noted = False
        self._stage = Stage(run)
        self._objects: dict[str, StoredObject] = {}
        """Whole objects, by digest: those of the last two backups, and what was written since."""
        self._before: Manifest | None = None
        self._tidy_until = 1
        """There are no manifests with lower numbers."""
        self._is_swept = False
        self._is_unsure = False
        """Whether a manifest may be there that this head does not know of."""

    def back_up(self) -> Manifest:
        """Back up what is new, if anything is; the backup that has everything up to when this began.

        Raises Superseded when another head goes on with the run, StoreError or an error of the driver when it
        cannot be done: the backup before it counts on then.
        """
        if not self._lease:
            self._take_over()
        elif self._is_unsure:
            self._find_out()
        try:
            with self._moment() as now:
                last, position = self.last, now.snapshot.position
                kept, level = kept_segments(last.segments if last is not None else ())
                after = kept[-1].until if kept else 0
                fresh = last is None or position > last.position
                written = now.snapshot.write(after, level, self._stage.folder) if fresh else []
            contents = {
                path: self._stage.digest(path, identity, now.held.get(path))
                for path, identity in now.files.items()
            }
            if last is not None and not fresh and contents == _contents(last):
                return last
            segments = (
                (*kept, *map(self._stored_segment, written)) if fresh or last is None else last.segments
            )
            files = {path: self._stored(content, now.held.get(path)) for path, content in contents.items()}
            manifest = Manifest(
                run=self._run.name,
                number=1 if last is None else last.number + 1,
                head=self._head,
                lease=self._lease,
                taken=now.snapshot.taken,
                interval=self._interval,
                position=position,
                segments=segments,
                files=files,
            )
            self._publish(manifest)
            return manifest
        finally:
            self._stage.clear()

    def _take_over(self) -> None:
        """Become the head of the run, which nobody else may be. Raises as `back_up`."""
        if not self._is_noted:
            self.is_new = note_changes(self._database, self._head.id)
            self._is_noted = True
        last = newest(self._address)
        with snapshot(self._database) as now:
            heads, position = now.heads(), now.position
        if last is None:
            self._lease = 1
            return
        if last.head.id not in heads:
            if self.is_new:
                raise RequestError(
                    f"{self._address.text} has a run of this name already, of {last.head}; go on with it: "
                    f"etude resume {self._address.text}, or choose another name"
                )
            raise superseded_by(last)
        if position < last.position:
            raise Superseded(
                f"{self._run} is older than its backup {last.number} at {self._address.text}; delete the "
                f"folder, and type: etude resume {self._address.text}"
            )
        number = last.number + 1
        update = {"number": number, "lease": number, "head": self._head}
        self.last = last
        self._publish(last.model_copy(update=update))
        self._lease, self._tidy_until = number, numbers(self._address)[0]

    def _publish(self, manifest: Manifest) -> None:
        """Make the manifest count."""
        self._is_unsure = True
        publish(self._address, manifest)
        if self._before is None:
            self._address.require_exclusive(name_of(manifest.number), manifest.encode())
        self._take(manifest)

    def _take(self, manifest: Manifest) -> None:
        """Go on from a backup that counts."""
        self._before, self.last = self.last or manifest, manifest
        self._is_unsure = False
        for stored in manifest.objects():
            self._objects[stored.sha256] = stored

    def _find_out(self) -> None:
        """Go on from this head's last manifest, which may be there though its answer was lost."""
        manifest = newest(self._address)
        if manifest is not None and manifest.head.id == self._head.id and manifest != self.last:
            self._take(manifest)
        self._is_unsure = False

    def tidy(self) -> None:
        """Delete what neither the last backup nor the one before it needs. Raises what the driver does."""
        if self.last is None or self._before is None:
            return
        needed = {stored.name for each in (self._before, self.last) for stored in each.objects()}
        garbage = [stored for stored in self._objects.values() if stored.name not in needed]
        # First the manifests: one that is there must not lack an object.
        self._address.delete(map(name_of, range(self._tidy_until, self._before.number)))
        self._address.delete(stored.name for stored in garbage)
        self._tidy_until = self._before.number
        for stored in garbage:
            del self._objects[stored.sha256]
        if not self._is_swept:
            self._sweep(needed)
            self._is_swept = True

    def withdraw(self) -> None:
        """Delete all backups of a run that no head but this one has ever backed up. Raises as `tidy`."""
        if self._lease == 1:
            self._address.delete(map(name_of, numbers(self._address)))
            self._address.delete(stored.name for stored in self._objects.values())

    def _sweep(self, needed: Container[str]) -> None:
        """Delete the objects of earlier heads that are not needed: of backups that were not finished."""
        leases = ((name, name.split("/")[1]) for name in self._address.names(_OBJECTS))
        old = (name for name, lease in leases if lease.isdecimal() and int(lease) < self._lease)
        self._address.delete([name for name in old if name not in needed])

    @contextmanager
    def _moment(self) -> Iterator[_Moment]:
        """The run at a moment in which its files did not change. Raises StoreError when there is none."""
        for _ in range(_TRIES):
            files = listing(self._run)
            with snapshot(self._database) as now:
                try:
                    held = self._stage.hold(files, self._objects)
                except FileNotFoundError:
                    continue
                # No file came, went or changed in between: the commit and the files belong together.
                if listing(self._run) == files:
                    yield _Moment(now, files, held)
                    return
            time.sleep(_PAUSE_SECONDS)
        raise StoreError(
            f"the files in {self._run} change all the time, so that none of them can be backed up"
        )

    def _stored_segment(self, segment: SegmentFile) -> Segment:
        stored = self._stored(Content.of_file(segment.path), segment.path)
        return Segment(after=segment.after, until=segment.until, level=segment.level, object=stored)

    def _stored(self, content: Content, source: Path | None) -> StoredObject:
        """The object with a content; written from the source and read back where there is none."""
        stored = self._objects.get(content.sha256)
        if stored is None:
            assert source is not None, "a file was not held that is not stored"
            name = f"{_OBJECTS}/{self._lease:010d}/{content.sha256}"
            self._address.write(name, source, content.size)
            if self._address.content(name, content.size) != content:
                raise StoreError(f"{self._address.text}/{name} is not what was written; it is written again")
            stored = StoredObject(name=name, sha256=content.sha256, size=content.size)
            self._objects[content.sha256] = stored
            self.bytes_written += content.size
        return stored


def _contents(manifest: Manifest) -> dict[str, Content]:
    return {path: stored.content for path, stored in manifest.files.items()}
