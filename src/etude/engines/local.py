"""Models in this process: `_type: local`, tiny ones made in the run folder, and opponents."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import quote

from pydantic import BaseModel, Field, model_validator

from etude.config.component import CHANGEABLE, LlmConfig, LlmRef
from etude.config.finetuning import Transcript, read_transcripts
from etude.config.registry import register_llm
from etude.core.call import Sampling
from etude.core.errors import MissingExtraError, RequestError
from etude.core.interfaces import innermost
from etude.models.source import locate
from etude.store.files import damage_in, note_sums, open_draft

if TYPE_CHECKING:
    from etude.config.builder import Builder
    from etude.engines.embedded import EmbeddedEngine


class TinyConfig(BaseModel, extra="forbid"):
    """A Llama of a few hundred thousand parameters with a byte-level tokenizer, for runs in minutes on a CPU.

    It knows nothing at first: `finetuning.warm_up` teaches it the format.
    """

    hidden_size: int = Field(default=64, ge=8)
    """Width of the model."""
    layers: int = Field(default=2, ge=1)
    """Number of transformer layers."""
    heads: int = Field(default=4, ge=1)
    """Number of attention heads. `hidden_size` divided by it must be an even number."""
    max_context: int = Field(default=256, ge=16)
    """Maximum number of tokens in prompt and answer together."""
    splits: list[str] = Field(default_factory=list)
    """Regular expressions whose matches stay tokens of their own, so that the model chooses each of them. Set
    `[0-9]` for digits."""


def base_folder(run: Path, name: str) -> Path:
    """Return the folder in a run for the tiny base model of the `llms` entry `name`."""
    return run / "bases" / quote(name, safe=" +@=")


async def make_base(config: TinyConfig, name: str, builder: Builder, folder: Path) -> None:
    """Write the tiny model of the `llms` entry `name` into `folder`, completely or not at all.

    Raises RequestError for an impossible shape, DatasetError for unreadable texts.
    """
    block = builder.config.finetuning
    blocks = [block.for_target(target) for target in block.targets] or [block]
    warm_ups = (each.warm_up for each in blocks if each.target_model == name)
    sources = [warm_up.transcripts for warm_up in warm_ups if warm_up is not None]
    examples = (await builder.get_dataset(block.run_configuration.dataset)).examples() if sources else []
    # The first 4000 transcripts suffice: more of the same kind teach the tokenizer nothing.
    parts = [read_transcripts(source, examples, block.seed)[:4000] for source in sources]
    await asyncio.to_thread(_write, config, [*chain.from_iterable(parts)], block.seed, folder)


def _write(config: TinyConfig, transcripts: Sequence[Transcript], seed: int, folder: Path) -> None:
    from etude.models.tiny import TinyShape, build_policy, build_tokenizer, conversation_texts

    if config.hidden_size % config.heads or config.hidden_size // config.heads % 2:
        raise RequestError(
            f"tiny: hidden_size {config.hidden_size} and heads {config.heads} do not fit together: each head "
            "needs an even share of the width"
        )
    texts = (text for each in transcripts for text in conversation_texts([each.messages], each.tools))
    tokenizer: Any = build_tokenizer(texts, splits=config.splits)
    policy = build_policy(tokenizer, seed, TinyShape(**config.model_dump(exclude={"splits"})))
    with open_draft(folder) as draft:
        policy.export(draft)
        note_sums(draft)


_LOG = logging.getLogger("etude.versions")


class LocalLlmConfig(LlmConfig, name="local"):
    """A model that runs in this process and can be trained here."""

    model: str | Path | None = None
    """A model folder, a GGUF file, or a name on the Hugging Face hub."""
    tiny: TinyConfig | None = None
    """Set this instead of `model` to make a tiny model from scratch in the run folder, without a download."""
    device: Annotated[str, CHANGEABLE] = "auto"
    """Set `auto`, `cpu`, `cuda`, `cuda:N` or `mps`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto` is bfloat16 on CUDA. On CPUs that multiply bfloat16 faster (AMX, or AMD's AVX512-BF16), it is
    bfloat16 for models of 10 million parameters or more. Elsewhere it is float32."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: the probability mass to keep."""
    max_tokens: int = Field(default=512, ge=1)
    """Maximum number of tokens of one completion."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the model's chat template, such as `enable_thinking: false`. A call can override each."""

    @model_validator(mode="after")
    def _check_base(self) -> LocalLlmConfig:
        if (self.model is None) == (self.tiny is None):
            raise ValueError("set either `model` or `tiny`, which are the first weights")
        return self

    @property
    def loading(self) -> dict[str, Any]:
        """The keyword arguments of `Policy.load`."""
        return {"device": self.device, "dtype": self.dtype}

    @property
    def sampling(self) -> Sampling:
        """The sampling options for calls that set none."""
        return Sampling(temperature=self.temperature, top_p=self.top_p, max_tokens=self.max_tokens)


class OpponentsConfig(LlmConfig, name="opponents"):
    """Earlier versions of a model in training; each episode plays against one of them.

    The version that training began with is always in the pool. Validations always use it, so that you can
    compare them. Calls are recorded but never trained on. Sampling options come from the entry in training.
    """

    of: LlmRef
    """The `llms` entry of the model in training."""
    draw: Literal["uniform", "latest"] = "uniform"
    """How to choose an episode's version: `uniform` draws from the pool, `latest` takes the newest."""
    size: int = Field(default=5, ge=1)
    """Number of newest versions in the pool, in addition to the first."""


@register_llm(config_type=LocalLlmConfig)
async def local(config: LocalLlmConfig, builder: Builder) -> AsyncIterator[EmbeddedEngine]:
    """Load the model and start its engine. Raises MissingExtraError without torch."""
    require_local_extra()
    source = await base_weights_folder(config, builder)
    locate(source)  # Before torch is loaded, so that a typo is reported at once.
    from etude.engines.embedded import EmbeddedEngine
    from etude.models.policy import Policy

    policy, base = None, (config.model, config.loading)
    # The unchanged weights of an earlier entry are shared. Each entry has its own tiny model.
    for name, other in builder.config.llms.items():
        if other is config or config.model is None or policy is not None:
            break
        if isinstance(other, LocalLlmConfig) and (other.model, other.loading) == base:
            earlier = innermost(await builder.get_llm(name))
            if isinstance(earlier, EmbeddedEngine) and not earlier.policy.weights_id:
                policy = earlier.policy.share_tensors()
    engine = EmbeddedEngine(
        policy or Policy.load(source, **config.loading),
        max_tokens=config.max_tokens,
        deterministic=builder.config.finetuning.deterministic,
    )
    try:
        yield engine
    finally:
        await engine.close()


async def base_weights_folder(config: LocalLlmConfig, builder: Builder) -> str | Path:
    """Return the folder or name of a model's first weights. A tiny model is made here, once per run.

    A tiny model follows from the config, so a damaged one is made again. Raises RequestError for a tiny model
    outside of a run, DatasetError for its texts.
    """
    if config.tiny is None:
        return str(config.model)
    if builder.run is None:
        raise RequestError("a model with `tiny` is made in a run folder, but there is no run")
    name = next(name for name, llm in builder.config.llms.items() if llm is config)
    folder = base_folder(builder.run.path, name)
    if damage := await asyncio.to_thread(damage_in, folder):
        if folder.exists():
            _LOG.warning("the base model %s is damaged (%s); it is made again", name, "; ".join(damage))
        await make_base(config.tiny, name, builder, folder)
    return folder


def require_local_extra() -> None:
    """Raise MissingExtraError if the packages to run and train models here are not installed."""
    missing = [
        name for name in ("torch", "transformers", "peft", "safetensors", "jinja2") if find_spec(name) is None
    ]
    if missing:
        raise MissingExtraError(f"a model in this process ({', '.join(missing)} not installed)", "local")
