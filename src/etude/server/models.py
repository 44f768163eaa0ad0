"""The models that a server knows: its base model and those made by jobs. Clients can export them."""

import asyncio
import shutil
import tarfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import sqlalchemy as sa
from fastapi import APIRouter
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse

from etude.config.finetuning import LoraOptions
from etude.core.errors import EtudeError
from etude.core.job import ModelVersion
from etude.models.device import choose_device, dtype_name
from etude.models.policy import Policy, policy_dtype
from etude.server.database import MODELS, Row, require_row
from etude.server.settings import ServerSettings
from etude.wire.http_server import ApiError


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model by its name, with the location of its weights."""

    name: str
    created: float
    folder: Path | None = None
    """The folder with the trained tensors, or None for the base model."""
    lora: LoraOptions | None = None
    """Its LoRA weights. None if all weights were trained, or none."""
    digest: str = ""


class ModelStore:
    """The served models by name. A name is only looked up, and never becomes part of a path."""

    def __init__(self, engine: sa.Engine, data_dir: Path, base: str) -> None:
        """`base` is the name of the server's base model."""
        self._engine = engine
        self._data_dir = data_dir
        self.base = ServedModel(base, time.time())

    def get(self, name: str) -> ServedModel:
        """Return the model with this name. Raises ApiError 404."""
        if name == self.base.name:
            return self.base
        row = require_row(self._engine, MODELS, name, "model", "model_not_found", param="model")
        return self._read_model(row)

    def all(self) -> list[ServedModel]:
        """Return the base model and the models that jobs made."""
        with self._engine.connect() as connection:
            rows = connection.execute(sa.select(MODELS).order_by(MODELS.c.number)).mappings().all()
        return [self.base, *(self._read_model(dict(row)) for row in rows)]

    def delete(self, name: str) -> None:
        """Forget a fine-tuned model and delete its weights. Raises ApiError 404."""
        model = self.get(name)
        with self._engine.begin() as connection:
            connection.execute(sa.delete(MODELS).where(MODELS.c.id == model.name))
        if model.folder is not None:
            shutil.rmtree(model.folder, ignore_errors=True)

    def _read_model(self, row: Row) -> ServedModel:
        folder, lora = self._data_dir / row["folder"], row["lora"] and LoraOptions(**row["lora"])
        return ServedModel(row["id"], row["created"], folder, lora, row["digest"])


def load_policy(settings: ServerSettings, model: ServedModel, *, keep_base: bool = False) -> Policy:
    """Load the server's base model and put the trained tensors of `model` on it.

    `keep_base` keeps the base model's tensors in addition to the trained ones. Raises RequestError if the
    base model cannot be loaded. Raises StoreError or EngineError if the tensors are missing, damaged or from
    another model.
    """
    policy = Policy.load(settings.model, device=settings.device, dtype=settings.dtype)
    if model.lora is not None:
        policy.use_lora(model.lora, 0)
    if keep_base and model.folder is not None:
        policy.keep_base()
    if model.folder is not None:
        policy.adopt(ModelVersion(number=1, location=str(model.folder), digest=model.digest))
    return policy


_ARCHIVE = "model.tar"


def weights_routes(settings: ServerSettings, models: ModelStore) -> APIRouter:
    """Return the route that exports a model."""
    router = APIRouter(tags=["models"])
    one_at_a_time = asyncio.Lock()
    """Each export holds one more model in memory until it is written."""

    @router.get(
        "/export/{model:path}",
        summary="Take a model away",
        response_class=FileResponse,
        responses={200: {"content": {"application/x-tar": {}}}},
    )
    async def export_model(model: str, lora: bool = False) -> FileResponse:
        """Return a tar archive of a folder that transformers loads.

        It has the whole model, or with `lora` only the LoRA weights.
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
        path = Path(folder.name) / _ARCHIVE
        return FileResponse(path, media_type="application/x-tar", background=BackgroundTask(folder.cleanup))

    return router


def _write(settings: ServerSettings, served: ServedModel, folder: Path, lora: bool) -> None:
    """Write an archive of the model as it is served. Use the CPU, because engine and jobs need the device."""
    kind: Any = dtype_name(policy_dtype(settings.model, settings.dtype, choose_device(settings.device)))
    policy = load_policy(replace(settings, device="cpu", dtype=kind), served)
    policy.export(folder / "model", merge=not lora)
    with tarfile.open(folder / _ARCHIVE, "w") as archive:
        for path in sorted((folder / "model").iterdir()):
            archive.add(path, path.name)
            path.unlink()
