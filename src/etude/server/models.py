"""The models that a server knows: the one that it was started with, and those that jobs made."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from etude.integrations.art.serving.names import art_names, served_under
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
        """The model of that name; under one of ART's names, the one that it stands for now.

        Raises ApiError 404.
        """
        if name == self._base.name:
            return self._base
        with self._engine.connect() as connection:
            row = connection.execute(sa.select(MODELS).where(MODELS.c.id == name)).mappings().first()
            served = served_under(connection, name) if row is None else None
        if served is not None:
            return self.get(served)
        if row is None:
            raise not_found("model", name, param="model", code="model_not_found")
        return self._served(dict(row))

    def all(self) -> list[ServedModel]:
        """All names: the base, the models that jobs made, and ART's names for any of them."""
        with self._engine.connect() as connection:
            rows = connection.execute(sa.select(MODELS).order_by(MODELS.c.number)).mappings().all()
            named = art_names(connection)
        own = [self._base, *(self._served(dict(row)) for row in rows)]
        known = {model.name: model for model in own}
        others = [
            replace(known[step.served], name=name, created=step.created)
            for name, step in named.items()
            if step.served in known
        ]
        return own + others

    def delete(self, name: str) -> None:
        """Forget a fine-tuned model and delete its weights. Raises ApiError 404."""
        model = self.get(name)
        with self._engine.begin() as connection:
            connection.execute(sa.delete(MODELS).where(MODELS.c.id == model.name))
        if model.folder is not None:
            shutil.rmtree(model.folder, ignore_errors=True)

    def delete_with_checkpoints(self, name: str) -> list[str]:
        """Delete what a job made, and its checkpoints; the names of all. None is fine too."""
        with self._engine.connect() as connection:
            job = sa.select(MODELS.c.job).where(MODELS.c.id == name).scalar_subquery()
            names = connection.execute(sa.select(MODELS.c.id).where(MODELS.c.job == job)).scalars().all()
        for one in names:
            self.delete(one)
        return list(names)

    def _served(self, row: dict[str, Any]) -> ServedModel:
        folder = self._data_dir / row["folder"]
        return ServedModel(row["id"], row["created"], folder, row["lora"], row["digest"])
