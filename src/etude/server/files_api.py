"""`/v1/files`."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException

from etude.server.errors import ApiError
from etude.server.files import FileStore, file_object
from etude.server.pages import Order, list_object

_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["fine-tune"]},
                    },
                }
            }
        },
    }
}

Limit = Annotated[int, Query(ge=1, le=10_000)]


def file_routes(files: FileStore) -> APIRouter:
    """Upload, list, retrieve, read and delete files."""
    router = APIRouter(prefix="/v1/files", tags=["files"])

    @router.post("", summary="Upload a training file", openapi_extra=_FORM)
    async def create_file(request: Request) -> dict[str, Any]:
        """JSON lines for `supervised`, `dpo` or `grpo`, each of them checked; a wrong file is not kept."""
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise ApiError(400, "a file is uploaded as multipart/form-data", param="file")
        try:
            # Large parts go to a temporary file on disk as they come.
            form = await request.form(max_files=1, max_fields=8)
        except MultiPartException as error:
            raise ApiError(400, f"the form is malformed: {error.message}", param="file") from error
        try:
            file = _checked(form)
            return file_object(await run_in_threadpool(files.upload, _name_of(file), file.file))
        finally:
            await form.close()

    @router.get("", summary="List files")
    def list_files(
        purpose: str | None = None, after: str | None = None, limit: Limit = 10_000, order: Order = "desc"
    ) -> dict[str, Any]:
        """The newest first, in pages."""
        rows, more = files.page(purpose, after, limit, order)
        return list_object([file_object(row) for row in rows], more)

    @router.get("/{file_id}", summary="Retrieve a file's description")
    def retrieve_file(file_id: str) -> dict[str, Any]:
        """Its name, size and purpose."""
        return file_object(files.get(file_id))

    @router.get("/{file_id}/content", summary="Read a file", response_class=FileResponse)
    def retrieve_file_content(file_id: str) -> FileResponse:
        """The file as it was uploaded, or as a job wrote it."""
        return FileResponse(files.path(file_id), media_type="application/octet-stream")

    @router.delete("/{file_id}", summary="Delete a file")
    def delete_file(file_id: str) -> dict[str, Any]:
        """Jobs that have not started yet fail without their file."""
        files.delete(file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    return router


def _checked(form: FormData) -> UploadFile:
    purpose, file = form.get("purpose"), form.get("file")
    if purpose != "fine-tune":
        raise ApiError(
            400,
            "purpose must be 'fine-tune': this server trains on files",
            param="purpose",
            code="invalid_value",
        )
    if not isinstance(file, UploadFile):
        raise ApiError(400, "there is no file in the form", param="file", code="missing_required_parameter")
    return file


def _name_of(file: UploadFile) -> str:
    """The name alone: clients may send a path."""
    return PurePosixPath((file.filename or "upload.jsonl").replace("\\", "/")).name[:255] or "upload.jsonl"
