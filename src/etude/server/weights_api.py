"""A model's weights over HTTP: what `etude export --server` fetches."""

from __future__ import annotations

import asyncio
import tarfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from etude.config.document import dump
from etude.core.errors import EtudeError
from etude.server.models import ModelStore, ServedModel, load_policy
from etude.server.settings import ServerSettings
from etude.wire.http_server import ApiError

_PIECE = 2**20
_BLOCK = tarfile.BLOCKSIZE


def weights_routes(settings: ServerSettings, models: ModelStore) -> APIRouter:
    """The route that gives a model away."""
    router = APIRouter(tags=["models"])
    one_at_a_time = asyncio.Lock()
    """Each is in memory once more until it is written."""

    @router.get(
        "/export/{model:path}",
        summary="Take a model away",
        response_class=StreamingResponse,
        responses={200: {"content": {"application/x-tar": {}}}},
    )
    async def export_model(model: str, lora: bool = False) -> StreamingResponse:
        """A tar archive of a folder that transformers loads, with a card.

        It has the whole model, or with `lora` the LoRA weights alone.
        """
        served = models.get(model)
        if lora and served.lora is None:
            raise ApiError(400, f"{model} has no LoRA weights; export the whole model", param="lora")
        folder = TemporaryDirectory(prefix="export-", dir=settings.data_dir, ignore_cleanup_errors=True)
        async with one_at_a_time:
            try:
                await run_in_threadpool(_write, settings, served, Path(folder.name), lora)
            except (EtudeError, OSError) as error:
                folder.cleanup()
                raise ApiError(500, f"{model} cannot be exported: {error}") from error
        card = _card(served, models.base.name, lora)
        (Path(folder.name) / "README.md").write_text(card, encoding="utf-8")
        return StreamingResponse(_archive(folder), media_type="application/x-tar")

    return router


def _write(settings: ServerSettings, served: ServedModel, folder: Path, lora: bool) -> None:
    """Write the model as it is served, by the CPU: the device is the engine's and the jobs'."""
    from etude.models.device import choose_device, dtype_name
    from etude.models.policy import dtype_of

    kind: Any = dtype_name(dtype_of(settings.model, settings.dtype, choose_device(settings.device)))
    policy = load_policy(settings.model_copy(update={"device": "cpu", "dtype": kind}), served)
    policy.export(folder, merge=not lora)


def _archive(folder: TemporaryDirectory[str]) -> Iterator[bytes]:
    """The files of a folder as a tar archive, piece by piece; then the folder is gone."""
    with folder as name:
        for path in sorted(Path(name).iterdir()):
            entry = tarfile.TarInfo(path.name)
            entry.size = path.stat().st_size
            yield entry.tobuf(tarfile.PAX_FORMAT)
            with path.open("rb") as file:
                while piece := file.read(_PIECE):
                    yield piece
            yield bytes(-entry.size % _BLOCK)
        yield bytes(2 * _BLOCK)


def _card(served: ServedModel, base: str, lora: bool) -> str:
    """The known facts of the model, as Markdown with the front matter that model hubs read."""
    front = {"library_name": "peft" if lora else "transformers", "tags": ["etude"]}
    rows = {"base model": Path(base).name if Path(base).is_absolute() else base}
    if served.lora is not None:
        rows["LoRA weights"] = f"rank {served.lora['r']}, alpha {served.lora['alpha']:g}"
    if served.digest:
        rows["digest of the trained weights"] = served.digest
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        f"---\n{dump(front).strip()}\n---\n\n# {served.name}\n\n"
        f"{'LoRA weights' if lora else 'Weights'} of a model of `etude serve`.\n\n"
        f"| | |\n|---|---|\n{table}\n\n"
        "No license was stated with this export; the base model's may hold for it.\n\n"
    )
