"""Tiny base models of a config: made from scratch in the run folder, with a tokenizer for their texts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pydantic import BaseModel, Field

from etude.config.finetuning import Transcript, read_transcripts
from etude.core.errors import RequestError
from etude.store.files import draft_of
from etude.store.sums import note_sums

if TYPE_CHECKING:
    from etude.config.builder import Builder

_MOST_TEXTS = 4000
"""Conversations that a tokenizer is made for: the first ones. More of the same kind teach it nothing."""


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
    """Tokens that the tokenizer may have: bytes, roles, and frequent pieces of the texts."""
    splits: list[str] = Field(default_factory=list)
    """Regular expressions of pieces that stay tokens of their own, so that the model chooses each of them:
    `[0-9]` for digits."""
    texts: str | None = None
    """Conversations that the tokenizer is made for, as `warm_up.transcripts`; left out: those of the model's
    warm-up, and without one it has bytes for tokens."""
    seed: int | None = Field(default=None, ge=0)
    """Of the weights; left out: the run's."""


def base_folder(run: Path, name: str) -> Path:
    """Where a run keeps the tiny base model of the entry `name` of `llms`."""
    return run / "bases" / quote(name, safe=" +@=")


async def make_base(config: TinyConfig, name: str, builder: Builder, folder: Path) -> None:
    """Write the tiny model of the entry `name` of `llms` into `folder`, whole or not at all.

    Raises RequestError for a shape that cannot be, DatasetError for texts that cannot be read.
    """
    block = builder.config.finetuning
    seed = block.seed if config.seed is None else config.seed
    blocks = [block.for_target(target) for target in block.targets] or [block]
    own = (stage for each in blocks if each.target_model == name for stage in each.warm_ups)
    sources = [stage.transcripts for stage in own] if config.texts is None else [config.texts]
    examples = (await builder.get_dataset(block.run_configuration.dataset)).examples() if sources else []
    talks = [
        talk for source in sources for talk in read_transcripts(source, examples, block.seed)[:_MOST_TEXTS]
    ]
    await asyncio.to_thread(_write, config, talks, seed, folder)


def _write(config: TinyConfig, talks: Sequence[Transcript], seed: int, folder: Path) -> None:
    from etude.models.tiny import TinyShape, build_policy, build_tokenizer, texts_of

    def texts() -> Iterator[str]:
        for talk in talks:
            yield from texts_of([talk.messages], talk.tools)

    if config.hidden_size % config.heads or config.hidden_size // config.heads % 2:
        raise RequestError(
            f"tiny: hidden_size {config.hidden_size} and heads {config.heads} do not go together: each head "
            "has an even share of the width"
        )
    tokenizer: Any = build_tokenizer(texts(), vocab_size=config.vocab_size, splits=config.splits)
    keys = ("hidden_size", "layers", "heads", "intermediate_size", "max_context")
    policy = build_policy(tokenizer, seed, TinyShape(**{key: getattr(config, key) for key in keys}))
    with draft_of(folder) as draft:
        policy.export(draft)
        note_sums(draft)
