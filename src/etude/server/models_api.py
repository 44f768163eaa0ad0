"""`/v1/models`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from etude.server.engines import EnginePool
from etude.server.errors import ApiError
from etude.server.models import ModelStore


def model_routes(models: ModelStore, pool: EnginePool) -> APIRouter:
    """List, retrieve and delete models."""
    router = APIRouter(prefix="/v1/models", tags=["models"])

    @router.get("", summary="List the models")
    def list_models() -> dict[str, Any]:
        """The base model, all that jobs have made, checkpoints included, and ART's names for them."""
        return {"object": "list", "data": [model.as_wire() for model in models.all()]}

    @router.get("/{model:path}", summary="Retrieve a model")
    def retrieve_model(model: str) -> dict[str, Any]:
        """One model by its name."""
        return models.get(model).as_wire() | {"id": model}

    @router.delete("/{model:path}", summary="Delete a fine-tuned model")
    async def delete_model(model: str) -> dict[str, Any]:
        """Forget a model that a job made, and delete its weights."""
        found = models.get(model).name
        if found == models.base.name:
            raise ApiError(400, "the base model cannot be deleted", param="model")
        models.delete(found)
        await pool.forget(found)
        return {"id": model, "object": "model", "deleted": True}

    return router
