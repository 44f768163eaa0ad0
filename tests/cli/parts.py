"""A model and a backend for command-line tests that need no torch: they learn by counting."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

from pydantic import Field, SecretStr

from etude.backends.trainer_adapter import Capabilities
from etude.config.builder import Builder
from etude.config.component import LlmConfig
from etude.config.finetuning import TrainerAdapterConfig
from etude.config.registry import register_llm, register_trainer_adapter
from etude.core.call import ChatRequest, Sampling
from etude.core.errors import EngineError
from tests.support import ScriptedEngine
from tests.training import FakeAdapter


class ScriptedConfig(LlmConfig, name="scripted"):
    """Says yes more often with each version; to a prompt with `broken` in it there is no answer."""

    model: str = "scripted"
    api_key: SecretStr | None = None
    temperature: float = 1.0
    log: Path | None = Field(default=None, description="Gets a line for each request.")

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature)


@register_llm(config_type=ScriptedConfig)
async def open_scripted(config: ScriptedConfig, builder: Builder) -> AsyncIterator[ScriptedEngine]:
    def answer(request: ChatRequest) -> str | Exception:
        if "broken" in str(request.messages):
            return EngineError("the endpoint answered 500 five times")
        said = int(hashlib.md5(str(request.key).encode()).hexdigest(), 16) % 100
        sure = request.sampling.temperature == 0
        return "yes" if sure or said < 30 + 20 * engine.version else "no"

    engine = ScriptedEngine(answer, log=config.log)
    yield engine
    await engine.close()


class CountingConfig(TrainerAdapterConfig, name="counting"):
    """A backend that makes a version for each job."""

    methods: list[str] = Field(default=["grpo", "dpo", "supervised"])
    lose_jobs: bool = Field(default=False, description="Whether a killed run's jobs are gone.")


adapters: dict[str | None, FakeAdapter] = {}
"""Those of the last run, by target."""


@register_trainer_adapter(config_type=CountingConfig)
async def counting(config: CountingConfig, builder: Builder) -> AsyncIterator[FakeAdapter]:
    capabilities = Capabilities(methods=frozenset(config.methods), versions=True)
    adapter = FakeAdapter(builder.run.path / "backend", lose_jobs=config.lose_jobs, capabilities=capabilities)
    adapters[builder.target] = adapter
    yield adapter
