"""The files of `/v1/files`: training data, checked line by line."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import file_digest
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, BinaryIO, Literal

import sqlalchemy as sa
from fastapi import APIRouter, Form, Query, UploadFile
from fastapi.responses import FileResponse

from etude.backends.job_rows import require_written
from etude.core.errors import ImpossibleCall, RequestError
from etude.core.json_text import JsonError, read_json
from etude.core.keys import content_hash
from etude.core.training_rows import ROWS, GrpoRow, TrainingRow, guess_method
from etude.core.trajectory import Method
from etude.models.text_codec import TextCodec
from etude.server.database import FILES, Order, Page, Row, fetch_page, list_object, require_row
from etude.store.files import open_draft, open_private
from etude.wire.http_server import ApiError
from etude.wire.request_body import validate_body

_LONGEST_LINE = 16 * 2**20

Limit = Annotated[int, Query(ge=1, le=10_000)]


def check_training_file(filename: str, file: BinaryIO, codec: TextCodec) -> tuple[Method, int]:
    """Check every line of an upload, one at a time. Return its training method and number of rows.

    `codec` is the model's tokenizer and template. Raises ApiError with file, line and field.
    """
    method: Method | None = None
    rows = 0
    for number, line in _lines(filename, file):
        where = f"{filename}, line {number}"
        try:
            row = read_json(line)
        except JsonError as error:
            raise _file_error(f"{where}: not JSON: {error.problem}") from error
        kind = guess_method(row)
        if kind is None:
            raise _file_error(
                f"{where}: this is not a training row; it needs `messages` (supervised), `input`, "
                "`preferred_output` and `non_preferred_output` (dpo), or `trajectories` (grpo)"
            )
        if method is not None and kind != method:
            raise _file_error(f"{where}: this row is for {kind}, but the rows before it are for {method}")
        method, rows = kind, rows + 1
        try:
            read = validate_body(ROWS[kind], row)
            # The model must be able to learn from the row as it stands.
            samples = read.group() if isinstance(read, GrpoRow) else []
            if (largest := max((max(sample.ids) for sample in samples), default=0)) >= codec.vocabulary:
                raise RequestError(
                    f"{largest} is not a token id of the model, which has {codec.vocabulary} tokens"
                )
            require_written(read, codec.template)
        except (RequestError, ImpossibleCall) as error:
            raise _file_error(f"{where}: {error}") from error
    if method is None:
        raise _file_error(f"{filename} has no lines")
    return method, rows


def read_rows(path: Path, method: Method) -> Iterator[tuple[str, TrainingRow]]:
    """Yield the place of each row, like `file-1, line 2`, and the row. Raises RequestError without a file."""
    if not path.exists():
        raise RequestError(f"file {path.name} was deleted before the job could read it")
    with path.open("rb") as file:
        for number, line in _lines(path.name, file):
            yield f"{path.name}, line {number}", ROWS[method].model_validate(read_json(line))


def _lines(filename: str, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the non-empty lines with their numbers."""
    number = 0
    while line := file.readline(_LONGEST_LINE + 1):
        number += 1
        if len(line) > _LONGEST_LINE:
            raise _file_error(f"{filename}, line {number}: the line is longer than {_LONGEST_LINE} bytes")
        if line.strip():
            yield number, line


def _file_error(message: str) -> ApiError:
    return ApiError(400, message, param="file", code="invalid_training_file")


class FileStore:
    """Files on disk under ids that the server chooses, and their rows in the database."""

    def __init__(self, engine: sa.Engine, data_dir: Path, codec: Callable[[], TextCodec]) -> None:
        """`codec` returns the model's tokenizer and template, which uploads are checked against."""
        self._engine = engine
        self._codec = codec
        self._folder = data_dir / "files"

    def upload(self, filename: str, content: BinaryIO) -> Row:
        """Check a training file and keep it. The same content under the same name is one file.

        Raises ApiError for a wrong line; StoreError.
        """
        sent: Any = content  # Of a kind with `readinto`, which BinaryIO does not show.
        name = f"file-{content_hash([filename, file_digest(sent, 'sha256').hexdigest()])}"
        content.seek(0)
        method, rows = check_training_file(filename, content, self._codec())
        content.seek(0)
        with open_draft(self._folder / name) as draft, open_private(draft, "wb") as target:
            shutil.copyfileobj(content, target)
        row = {
            "id": name,
            "created": time.time(),
            "filename": filename,
            "bytes": content.tell(),
            "method": method,
            "rows": rows,
        }
        with suppress(sa.exc.IntegrityError), self._engine.begin() as connection:
            connection.execute(sa.insert(FILES).values(row))
        return self.get(name)

    def get(self, name: str) -> Row:
        """Return a file's row. Raises ApiError 404."""
        return require_row(self._engine, FILES, name, "file", "file_not_found")

    def path(self, name: str) -> Path:
        """Return the path of a file's content. Raises ApiError 404."""
        return self._folder / str(self.get(name)["id"])

    def page(self, after: str | None, limit: int, order: Order) -> Page:
        """Return a page of files."""
        return fetch_page(self._engine, FILES, after=after, limit=limit, order=order)

    def delete(self, name: str) -> None:
        """Delete a file. Raises ApiError 404."""
        path = self.path(name)
        with self._engine.begin() as connection:
            connection.execute(sa.delete(FILES).where(FILES.c.id == name))
        path.unlink(missing_ok=True)


def file_object(row: Row) -> dict[str, Any]:
    """Return the `file` object."""
    return {
        **{name: row[name] for name in ("id", "bytes", "filename")},
        "object": "file",
        "purpose": "fine-tune",
        "created_at": int(row["created"]),
        "status": "processed",
        "status_details": None,
        "expires_at": None,
    }


def file_routes(files: FileStore) -> APIRouter:
    """Return the routes to upload, list, retrieve, read and delete files."""
    router = APIRouter(prefix="/v1/files", tags=["files"])

    @router.post("", summary="Upload a training file")
    def create_file(
        file: UploadFile,
        purpose: Annotated[Literal["fine-tune"], Form()],
        anchor: Annotated[str | None, Form(alias="expires_after[anchor]")] = None,
        seconds: Annotated[str | None, Form(alias="expires_after[seconds]")] = None,
    ) -> dict[str, Any]:
        """Upload JSON lines for one training method. Every line is checked, and a wrong file is not kept.

        An upload that is repeated returns the file of the first.
        """
        if anchor is not None or seconds is not None:
            message = "files are kept here until they are deleted; leave 'expires_after' out"
            raise ApiError(400, message, param="expires_after", code="invalid_value")
        # Keep only the file name, because clients may send a path.
        name = PurePosixPath((file.filename or "").replace("\\", "/")).name[:255]
        return file_object(files.upload(name or "upload.jsonl", file.file))

    @router.get("", summary="List files")
    def list_files(
        purpose: Literal["fine-tune"] | None = None,
        after: str | None = None,
        limit: Limit = 10_000,
        order: Order = "desc",
    ) -> dict[str, Any]:
        """List the newest files first, in pages. All are for fine-tuning."""
        return list_object(files.page(after, limit, order), file_object)

    @router.get("/{file_id}", summary="Retrieve a file's description")
    def retrieve_file(file_id: str) -> dict[str, Any]:
        return file_object(files.get(file_id))

    @router.get("/{file_id}/content", summary="Read a file", response_class=FileResponse)
    def retrieve_file_content(file_id: str) -> FileResponse:
        """Return the file as it was uploaded."""
        return FileResponse(files.path(file_id), media_type="application/octet-stream")

    @router.delete("/{file_id}", summary="Delete a file")
    def delete_file(file_id: str) -> dict[str, Any]:
        """Delete a file. Jobs that need it and have not started yet will fail."""
        files.delete(file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    return router
