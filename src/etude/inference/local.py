"""A model in this process, `_type: local`, also a tiny one made in the run folder; and opponents of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import quote

from pydantic import BaseModel, Field, model_validator

from etude.config.component import CHANGEABLE, LlmConfig
from etude.config.finetuning import Transcript, read_transcripts
from etude.config.references import LlmRef
from etude.config.registry import register_llm
from etude.core.call import Sampling
from etude.core.errors import MissingExtraError, RequestError
from etude.core.interfaces import bare
from etude.models.source import locate
from etude.store.files import damage_in, draft_of, note_sums

if TYPE_CHECKING:
    from etude.config.builder import Builder
    from etude.inference.embedded import EmbeddedEngine
    from etude.models.policy import Policy


class TinyConfig(BaseModel, extra="forbid"):
    """A Llama of a few hundred thousand parameters with a byte-level tokenizer, for runs in minutes on a CPU.

    It knows nothing: `finetuning.warm_up` teaches it the format.
    """

    hidden_size: int = Field(default=64, ge=8)
    """Width."""
    layers: int = Field(default=2, ge=1)
    """Transformer layers."""
    heads: int = Field(default=4, ge=1)
    """Attention heads; they divide the width."""
    intermediate_size: int = Field(default=192, ge=8)
    """Width of the feed-forward layers."""
    max_context: int = Field(default=256, ge=16)
    """Tokens of prompt and answer together."""
    vocab_size: int = Field(default=512, ge=263)
    """Tokens that the tokenizer may have: bytes, roles, and frequent pieces of the warm-up's texts."""
    splits: list[str] = Field(default_factory=list)
    """Regular expressions of pieces that stay tokens of their own, so that the model chooses each of them:
    `[0-9]` for digits."""


def base_folder(run: Path, name: str) -> Path:
    """Where a run keeps the tiny base model of the entry `name` of `llms`."""
    return run / "bases" / quote(name, safe=" +@=")


async def make_base(config: TinyConfig, name: str, builder: Builder, folder: Path) -> None:
    """Write the tiny model of the entry `name` of `llms` into `folder`, whole or not at all.

    Raises RequestError for a shape that cannot be, DatasetError for texts that cannot be read.
    """
    block = builder.config.finetuning
    blocks = [block.for_target(target) for target in block.targets] or [block]
    own = (stage for each in blocks if each.target_model == name for stage in each.warm_ups)
    sources = [stage.transcripts for stage in own]
    examples = (await builder.get_dataset(block.run_configuration.dataset)).examples() if sources else []
    # A tokenizer is made for the first ones: more of the same kind teach it nothing.
    talks = [talk for source in sources for talk in read_transcripts(source, examples, block.seed)[:4000]]
    await asyncio.to_thread(_write, config, talks, block.seed, folder)


def _write(config: TinyConfig, talks: Sequence[Transcript], seed: int, folder: Path) -> None:
    from etude.models.tiny import TinyShape, build_policy, build_tokenizer, texts_of

    if config.hidden_size % config.heads or config.hidden_size // config.heads % 2:
        raise RequestError(
            f"tiny: hidden_size {config.hidden_size} and heads {config.heads} do not go together: each head "
            "has an even share of the width"
        )
    texts = (text for talk in talks for text in texts_of([talk.messages], talk.tools))
    tokenizer: Any = build_tokenizer(texts, vocab_size=config.vocab_size, splits=config.splits)
    shape = TinyShape(**config.model_dump(exclude={"vocab_size", "splits"}))
    policy = build_policy(tokenizer, seed, shape)
    with draft_of(folder) as draft:
        policy.export(draft)
        note_sums(draft)


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
    quantization: Literal["4bit"] | None = None
    """How the base is held under LoRA weights that are trained: `4bit` in NF4 numbers, in about a quarter of
    bfloat16's memory. It needs CUDA and the extra `bnb`."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: probability mass kept."""
    max_tokens: int = Field(default=512, ge=1)
    """Most tokens of one completion."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the model's chat template, such as `enable_thinking: false`, where a call gives none."""

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
    def sampling(self) -> Sampling:
        """How to sample where a call does not say."""
        return Sampling(temperature=self.temperature, top_p=self.top_p, max_tokens=self.max_tokens)


class OpponentsConfig(LlmConfig, name="opponents"):
    """Earlier versions of a model that is trained: one of a pool is drawn for each episode.

    The version that training began with is always in the pool, and plays in validations, so that these can
    be compared. Calls are recorded, and never trained on. It samples as the entry that it is a version of.
    """

    of: LlmRef
    """The entry of `llms` that is trained."""
    draw: Literal["uniform", "latest"] = "uniform"
    """Which version an episode gets: any of the pool, or the newest."""
    size: int = Field(default=5, ge=1)
    """Versions in the pool: the newest ones, the base not counted."""


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
