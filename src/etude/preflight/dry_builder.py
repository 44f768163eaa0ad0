"""Building what a config names, but for the models of this process."""

from __future__ import annotations

from etude.config.builder import Builder
from etude.core.call import ChatRequest, Completion
from etude.core.errors import EngineError
from etude.core.interfaces import Engine
from etude.core.job import ModelVersion
from etude.inference.local import LocalLlmConfig


class _NoEngine:
    """Stands where a model of this process would be. It samples nothing."""

    version = 0

    async def complete(self, request: ChatRequest) -> Completion:
        raise EngineError("a check samples nothing")

    async def adopt(self, version: ModelVersion) -> None:
        raise EngineError("a check adopts nothing")

    async def close(self) -> None:
        pass


class DryBuilder(Builder):
    """Builds everything but the models of this process, which may be large."""

    async def get_llm(self, name: str) -> Engine:
        if isinstance(self.config.llms.get(name), LocalLlmConfig):
            return _NoEngine()
        return await super().get_llm(name)
