"""`/engine`: putting the engine away and bringing it back."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from etude.server.engines import EnginePool


def engine_routes(pool: EnginePool) -> APIRouter:
    """Start, stop and status."""
    router = APIRouter(prefix="/engine", tags=["engine"])

    @router.post("/start", summary="Bring the engine back")
    async def start_engine() -> dict[str, Any]:
        """Serve again; returns when the base model is in memory. Does nothing where it is."""
        await pool.start()
        return pool.status()

    @router.post("/stop", summary="Put the engine away")
    async def stop_engine() -> dict[str, Any]:
        """Let requests under way finish, and free the device. New requests wait, or get 503."""
        await pool.stop()
        return pool.status()

    @router.get("/status", summary="What the engine does")
    async def engine_status() -> dict[str, Any]:
        """`running`, `stopping` or `stopped`, and the models in memory."""
        return pool.status()

    return router
