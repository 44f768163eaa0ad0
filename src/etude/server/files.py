"""The files that clients upload, and those that jobs write."""

from __future__ import annotations

import hashlib
import shutil
import time
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

import sqlalchemy as sa

from etude.server.database import FILES
from etude.server.errors import ApiError
from etude.server.ids import is_id, new_id, not_found
from etude.server.pages import Order, Row, page_of
from etude.server.training_file import TrainingFile, check_training_file
from etude.store.files import draft_of

Purpose: TypeAlias = Literal["fine-tune", "fine-tune-results"]


class FileStore:
    """Files on disk, named by ids of the server's own, and what is known of them in the database."""

    def __init__(self, engine: sa.Engine, data_dir: Path) -> None:
        self._engine = engine
        self._folder = data_dir / "files"

    def upload(self, filename: str, content: BinaryIO) -> Row:
        """Check a training file and keep it. Raises ApiError for a wrong line, StoreError."""
        checked = check_training_file(filename, content)
        content.seek(0)
        name = new_id("file")
        with draft_of(self._folder / name) as draft, draft.open("wb") as target:
            shutil.copyfileobj(content, target)
        return self._insert(name, filename, "fine-tune", checked)

    def write_results(self, name: str, filename: str, text: str) -> None:
        """Keep what a job tells of itself, under a name that the job gives it: writing again is fine."""
        with draft_of(self._folder / name) as draft:
            draft.write_text(text, encoding="utf-8")
        with self._engine.connect() as connection:
            known = connection.execute(sa.select(FILES.c.id).where(FILES.c.id == name)).first()
        if known is None:
            self._insert(name, filename, "fine-tune-results", None)

    def get(self, name: str) -> Row:
        """What is known of a file. Raises ApiError 404."""
        with self._engine.connect() as connection:
            row = connection.execute(sa.select(FILES).where(FILES.c.id == name)).mappings().first()
        if row is None:
            raise not_found("file", name, param="id", code="file_not_found")
        return dict(row)

    def path(self, name: str) -> Path:
        """Where a file's content is. Raises ApiError 404."""
        row = self.get(name)
        if not is_id(row["id"]):
            raise not_found("file", name, param="id", code="file_not_found")
        return self._folder / str(row["id"])

    def are_same(self, name: str | None, other: str | None) -> bool:
        """Whether two files have the same content. One that is not there is the same as itself only."""
        if name == other:
            return True
        if name is None or other is None:
            return False
        try:
            contents = [self._digest(one) for one in (name, other)]
        except ApiError:
            return False
        return contents[0] == contents[1]

    def _digest(self, name: str) -> bytes:
        with self.path(name).open("rb") as content:
            return hashlib.file_digest(content, "blake2b").digest()

    def page(
        self, purpose: str | None, after: str | None, limit: int, order: Order
    ) -> tuple[list[Row], bool]:
        """A page of files, and whether there are more."""
        conditions = [] if purpose is None else [FILES.c.purpose == purpose]
        return page_of(self._engine, FILES, *conditions, after=after, limit=limit, order=order)

    def delete(self, name: str) -> None:
        """Delete a file. Raises ApiError 404."""
        path = self.path(name)
        with self._engine.begin() as connection:
            connection.execute(sa.delete(FILES).where(FILES.c.id == name))
        path.unlink(missing_ok=True)

    def _insert(self, name: str, filename: str, purpose: Purpose, checked: TrainingFile | None) -> Row:
        row = {
            "id": name,
            "created": time.time(),
            "filename": filename,
            "purpose": purpose,
            "bytes": (self._folder / name).stat().st_size,
            "method": None if checked is None else checked.method,
            "rows": 0 if checked is None else checked.rows,
        }
        with self._engine.begin() as connection:
            connection.execute(sa.insert(FILES).values(row))
        return row


def file_object(row: Row) -> dict[str, Any]:
    """The `file` object."""
    return {
        "id": row["id"],
        "object": "file",
        "bytes": row["bytes"],
        "created_at": int(row["created"]),
        "filename": row["filename"],
        "purpose": row["purpose"],
        "status": "processed",
        "status_details": None,
        "expires_at": None,
    }
