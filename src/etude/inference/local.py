"""The config of a model in this process: `_type: local`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from etude.config.component import CHANGEABLE, LlmConfig
from etude.config.registry import register_llm
from etude.core.call import Sampling
from etude.core.errors import MissingExtraError, RequestError
from etude.core.interfaces import bare
from etude.inference.tiny import TinyConfig, base_folder, make_base
from etude.models.source import locate
from etude.store.sums import damage_in

if TYPE_CHECKING:
    from etude.config.builder import Builder
    from etude.inference.embedded import EmbeddedEngine
    from etude.models.policy import Policy


_LOG = logging.getLogger("etude.versions")


class LocalLlmConfig(LlmConfig, name="local"):
    """A model that runs, and can be trained, in this process."""

    model: str | Path | None = None
    """A model folder, a GGUF file, or a name on the Hugging Face hub."""
    tiny: TinyConfig | None = None
    """In place of `model`: a tiny model, made from scratch in the run folder; nothing is downloaded."""
    device: Annotated[str, CHANGEABLE] = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:N` or `mps`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto` is bfloat16 on CUDA, and for 10 million parameters or more on CPUs that multiply it
    (AVX512-BF16, AMX); float32 elsewhere."""
    quantization: Literal["4bit", "8bit"] | None = None
    """How the base is held under LoRA weights that are trained. `4bit` holds it in NF4 numbers, in about a
    quarter of bfloat16's memory; it needs CUDA and the extra `bnb`. `8bit` holds a byte for a weight of the
    decoder's linear layers, a quarter of float32 and half of bfloat16, on any device."""
    sampling_weights: Annotated[Literal["same", "int8"], CHANGEABLE] = "same"
    """`int8` samples on a CPU from a copy of the weights that is rounded to eight bits, up to half as fast
    again where there is one request at a time. Logprobs are those of what was sampled, so GRPO's `correction`
    makes up for the difference."""
    speculation: Annotated[Literal["auto", "prompt_lookup", "off"], CHANGEABLE] = "auto"
    """`prompt_lookup`: where an answer repeats earlier text, a pass of the model on a CPU reads what came
    then along with the last token. What is sampled and its logprobs stay the same, up to rounding. `auto`
    does so for models of 10 million parameters or more: with smaller ones the look-up itself takes time."""
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

    @model_validator(mode="after")
    def _has_one_base(self) -> LocalLlmConfig:
        if (self.model is None) == (self.tiny is None):
            raise ValueError("set `model` or `tiny`, and not both: the weights to begin with")
        return self

    @property
    def loading(self) -> dict[str, Any]:
        """The keyword arguments of `Policy.load`."""
        return {"device": self.device, "dtype": self.dtype, "quantization": self.quantization}

    @property
    def engine_options(self) -> dict[str, Any]:
        """Keyword arguments of `EmbeddedEngine`."""
        eight_bits = self.sampling_weights == "int8"
        return {
            "max_batch": self.max_batch,
            "max_tokens": self.max_tokens,
            "eight_bits": eight_bits,
            "speculates": None if self.speculation == "auto" else self.speculation == "prompt_lookup",
        }

    @property
    def sampling(self) -> Sampling:
        """How to sample where a call does not say."""
        return Sampling(temperature=self.temperature, top_p=self.top_p, max_tokens=self.max_tokens)


@register_llm(config_type=LocalLlmConfig)
async def local(config: LocalLlmConfig, builder: Builder) -> AsyncIterator[EmbeddedEngine]:
    """Load the model and start its engine. Raises MissingExtraError without torch."""
    require_local_extra()
    source = await base_of(config, builder)
    locate(source)  # Before torch is loaded: a slip of the pen need not wait for it.
    from etude.inference.embedded import EmbeddedEngine
    from etude.models.policy import Policy

    other = await _of_same_base(config, builder)
    engine = EmbeddedEngine(
        other.beside() if other is not None else Policy.load(source, **config.loading),
        **config.engine_options,
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
    if config.model is None:
        return None  # Each is made for itself.
    for name, other in builder.config.llms.items():
        if other is config:
            break
        if isinstance(other, LocalLlmConfig) and (other.model, other.loading) == base:
            engine = bare(await builder.get_llm(name))
            if isinstance(engine, EmbeddedEngine) and not engine.policy.weights_id:
                return engine.policy
    return None


async def base_of(config: LocalLlmConfig, builder: Builder) -> str | Path:
    """The folder or name of a model's first weights; those of a tiny one are made here, once in a run.

    They follow from the config: where their files are not what was written, they are made again.

    Raises RequestError for a tiny one outside of a run, DatasetError for its texts.
    """
    if config.tiny is None:
        return str(config.model)
    if builder.run is None:
        raise RequestError("a model with `tiny` is made in a run folder, and there is no run")
    name = next(name for name, llm in builder.config.llms.items() if llm is config)
    folder = base_folder(builder.run.path, name)
    if damage := await asyncio.to_thread(damage_in, folder):
        if folder.exists():
            _LOG.warning("the base model %s is damaged (%s); it is made again", name, "; ".join(damage))
        await make_base(config.tiny, name, builder, folder)
    return folder


def require_local_extra() -> None:
    """Raise MissingExtraError when the packages that run and train models here are not installed."""
    missing = [
        name for name in ("torch", "transformers", "peft", "safetensors", "jinja2") if find_spec(name) is None
    ]
    if missing:
        raise MissingExtraError(f"a model in this process ({', '.join(missing)} not installed)", "local")
