"""All of a model but its weights: what turns words into tokens and back, and where its answers end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.core.errors import RequestError
from etude.models.source import locate, not_loaded
from etude.models.template import ChatTemplate


def stop_ids(tokenizer: Any, *sources: Any) -> frozenset[int]:
    """Those that the model's own files name: its configs `sources`, and its tokenizer.

    Raises RequestError when none of them names any.
    """
    found: set[int] = set()
    for source in (*sources, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    if not found:
        raise RequestError(
            f"the model '{tokenizer.name_or_path}' names no end-of-turn token (eos_token_id); set it in its "
            "generation_config.json"
        )
    return frozenset(found)


_UNKNOWN_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class Speech:
    """How a model reads and writes."""

    tokenizer: Any
    template: ChatTemplate
    stop_ids: frozenset[int]
    """The tokens that end a turn."""
    max_context: int
    """Tokens that prompt and completion may have together."""
    vocabulary: int
    """Token ids are below it."""

    @classmethod
    def load(cls, source: str | Path) -> Speech:
        """Load tokenizer and config of a causal LM, without its weights.

        Raises RequestError when there is no such model or it cannot be used for chat.
        """
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig

        name = locate(source)
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
            config = AutoConfig.from_pretrained(name)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise not_loaded(source, error) from error
        try:
            generation: Any = GenerationConfig.from_pretrained(name)
        except OSError:
            generation = None  # The file is optional; the config names the tokens then.
        ends = stop_ids(tokenizer, generation, config)
        text = config.get_text_config()
        return cls(
            tokenizer,
            ChatTemplate(tokenizer, ends),
            ends,
            int(getattr(text, "max_position_embeddings", None) or _UNKNOWN_CONTEXT),
            int(text.vocab_size),
        )
