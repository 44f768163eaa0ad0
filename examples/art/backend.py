"""ART's client of a training server. openpipe-art 0.4 has one, and 0.5 has lost it; this is what it did."""

import inspect
import json
from collections.abc import AsyncIterator
from typing import Any

import art
import httpx


def connect(base_url: str) -> Any:
    """ART's own client, where the release has one."""
    has_one = "base_url" in inspect.signature(art.Backend.__init__).parameters
    return art.Backend(base_url=base_url) if has_one else HttpBackend(base_url)


class HttpBackend:
    """What a model of openpipe-art 0.5.17 asks of its backend."""

    def __init__(self, base_url: str) -> None:
        self._http = httpx.AsyncClient(base_url=base_url, timeout=600)

    async def register(self, model: Any) -> None:
        await self._ask("/register", model.safe_model_dump())

    async def _prepare_backend_for_training(self, model: Any, config: Any) -> tuple[str, str]:
        body = {"model": model.safe_model_dump(), "config": config}
        address, key = await self._ask("/_prepare_backend_for_training", body)
        return address, key

    async def _get_step(self, model: Any) -> int:
        return int(await self._ask("/_get_step", model.safe_model_dump()))

    async def _delete_checkpoint_files(self, model: Any, steps_to_keep: list[int]) -> None:
        body = {"model": model.safe_model_dump(), "steps_to_keep": steps_to_keep}
        await self._ask("/_delete_checkpoint_files", body)

    async def _train_model(
        self, model: Any, trajectory_groups: Any, config: Any, dev_config: Any, verbose: bool = False
    ) -> AsyncIterator[dict[str, float]]:
        body = {
            "model": model.safe_model_dump(),
            "trajectory_groups": [group.model_dump(mode="json") for group in trajectory_groups],
            "config": config.model_dump(),
            "dev_config": dev_config,
            "verbose": verbose,
        }
        async with self._http.stream("POST", "/_train_model", json=body, timeout=None) as response:
            if response.is_error:
                raise RuntimeError((await response.aread()).decode())
            async for line in response.aiter_lines():
                yield json.loads(line)

    async def close(self) -> None:
        await self._http.aclose()

    async def _ask(self, path: str, body: Any) -> Any:
        response = await self._http.post(path, json=body)
        if response.is_error:
            raise RuntimeError(response.text)
        return response.json()
