"""An engine that answers by script: judges are tested without a model."""

from __future__ import annotations

from collections.abc import Callable

from etude.core.call import ChatRequest, Completion
from etude.core.errors import EngineError
from etude.core.job import ModelVersion

Script = Callable[[ChatRequest], "str | Completion | EngineError"]


class ScriptedEngine:
    """Answers with what `script` makes of each request, and keeps the requests."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.requests: list[ChatRequest] = []

    @property
    def version(self) -> int:
        return 0

    async def complete(self, request: ChatRequest) -> Completion:
        self.requests.append(request)
        answer = self._script(request)
        if isinstance(answer, EngineError):
            raise answer
        return (
            answer if isinstance(answer, Completion) else Completion({"role": "assistant", "content": answer})
        )

    async def adopt(self, version: ModelVersion) -> None:
        """There is only one version."""

    async def close(self) -> None:
        """Nothing is held."""


def answering(*answers: str | Completion | EngineError) -> ScriptedEngine:
    """An engine that gives these answers one after the other."""
    remaining = iter(answers)
    return ScriptedEngine(lambda request: next(remaining))
