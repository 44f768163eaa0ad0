"""The models that a server knows: the one that it was started with, and those that jobs made."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from etude.server.database import MODELS
from etude.server.ids import not_found

OWNER = "etude"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model by its name, and where its weights are."""

    name: str
    created: float
    folder: Path | None = None
    """With the trained tensors; None for the base model."""
    lora: dict[str, Any] | None = None
    """Rank and scale of its LoRA weights; None where all weights were trained, or none."""
    digest: str = ""

    def as_wire(self) -> dict[str, Any]:
        """The `model` object."""
        return {"id": self.name, "object": "model", "created": int(self.created), "owned_by": OWNER}


class ModelStore:
    """Finds models by name. A name is only looked up, and never made part of a path."""

    def __init__(self, engine: sa.Engine, data_dir: Path, base: str) -> None:
        self._engine = engine
        self._data_dir = data_dir
        self._base = ServedModel(base, time.time())

    @property
    def base(self) -> ServedModel:
        """The model that the server was started with."""
        return self._base

    def get(self, name: str) -> ServedModel:
        """The model of that name. Raises ApiError 404."""
        if name == self._base.name:
            return self._base
        with self._engine.connect() as connection:
            row = connection.execute(sa.select(MODELS).where(MODELS.c.id == name)).mappings().first()
        if row is None:
            raise not_found("model", name, param="model", code="model_not_found")
        return self._served(dict(row))

    def all(self) -> list[ServedModel]:
        """All models, the base first."""
        with self._engine.connect() as connection:
            rows = connection.execute(sa.select(MODELS).order_by(MODELS.c.number)).mappings().all()
        return [self._base, *(self._served(dict(row)) for row in rows)]

    def delete(self, name: str) -> None:
        """Forget a fine-tuned model and delete its weights. Raises ApiError 404."""
        model = self.get(name)
        with self._engine.begin() as connection:
            connection.execute(sa.delete(MODELS).where(MODELS.c.id == name))
        if model.folder is not None:
            shutil.rmtree(model.folder, ignore_errors=True)

    def _served(self, row: dict[str, Any]) -> ServedModel:
        folder = self._data_dir / row["folder"]
        return ServedModel(row["id"], row["created"], folder, row["lora"], row["digest"])
