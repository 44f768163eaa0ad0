"""The config of a model in this process: `_type: local`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from etude.config.component import CHANGEABLE, LlmConfig
from etude.config.registry import register_llm
from etude.core.call import Sampling
from etude.core.errors import MissingExtraError
from etude.models.source import locate

if TYPE_CHECKING:
    from etude.config.builder import Builder
    from etude.inference.embedded import EmbeddedEngine
    from etude.models.policy import Policy


class LocalLlmConfig(LlmConfig, name="local"):
    """A model that runs, and can be trained, in this process."""

    model: str | Path
    """A model folder, or a name on the Hugging Face hub."""
    device: Annotated[str, CHANGEABLE] = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:N` or `mps`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto` is bfloat16 on CUDA and float32 elsewhere."""
    quantization: Literal["4bit"] | None = None
    """`4bit` holds the base in NF4 numbers, in about a quarter of bfloat16's memory, under LoRA weights that
    are trained. It needs CUDA and the extra `bnb`."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: probability mass kept."""
    max_tokens: int = Field(default=512, ge=1)
    """Most tokens of one completion."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the model's chat template, such as `enable_thinking: false`, where a call gives none."""
    max_batch: Annotated[int, CHANGEABLE] = Field(default=256, ge=1)
    """Most requests that are sampled at once."""

    @property
    def loading(self) -> dict[str, Any]:
        """The keyword arguments of `Policy.load`."""
        return {"device": self.device, "dtype": self.dtype, "quantization": self.quantization}

    @property
    def sampling(self) -> Sampling:
        """How to sample where a call does not say."""
        return Sampling(temperature=self.temperature, top_p=self.top_p, max_tokens=self.max_tokens)


@register_llm(config_type=LocalLlmConfig)
async def local(config: LocalLlmConfig, builder: Builder) -> AsyncIterator[EmbeddedEngine]:
    """Load the model and start its engine. Raises MissingExtraError without torch."""
    require_local_extra()
    locate(config.model)  # Before torch is loaded: a slip of the pen need not wait for it.
    from etude.inference.embedded import EmbeddedEngine
    from etude.models.policy import Policy

    other = await _of_same_base(config, builder)
    engine = EmbeddedEngine(
        other.beside() if other is not None else Policy.load(config.model, **config.loading),
        max_batch=config.max_batch,
        max_tokens=config.max_tokens,
        deterministic=builder.config.finetuning.deterministic,
    )
    try:
        yield engine
    finally:
        await engine.close()


async def _of_same_base(config: LocalLlmConfig, builder: Builder) -> Policy | None:
    """The policy of an entry before this one with the same weights, which nothing has changed yet."""
    from etude.inference.embedded import EmbeddedEngine

    base = config.model, config.loading
    for name, other in builder.config.llms.items():
        if other is config:
            break
        if isinstance(other, LocalLlmConfig) and (other.model, other.loading) == base:
            engine = await builder.get_llm(name)
            if isinstance(engine, EmbeddedEngine) and not engine.policy.weights_id:
                return engine.policy
    return None


def require_local_extra() -> None:
    """Raise MissingExtraError when the packages that run and train models here are not installed."""
    missing = [
        name for name in ("torch", "transformers", "peft", "safetensors", "jinja2") if find_spec(name) is None
    ]
    if missing:
        raise MissingExtraError(f"a model in this process ({', '.join(missing)} not installed)", "local")
