"""All of a model but its weights: what turns words into tokens and back, and where its answers end."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.core.errors import RequestError
from etude.models.checkpoint import LOADING_ERRORS
from etude.models.grammar import Grammars
from etude.models.source import not_loaded, pretrained
from etude.models.template import ChatTemplate

_UNKNOWN_CONTEXT = 4096
_DIGITS_TOGETHER = re.compile(r"Ġ?\d\d|Ġ\d")


@dataclass(frozen=True, slots=True)
class Speech:
    """How a model reads and writes."""

    tokenizer: Any
    template: ChatTemplate
    stop_ids: frozenset[int]
    """The tokens that end a turn."""
    max_context: int
    """Tokens that prompt and completion may have together; a guess where the config has no limit."""
    vocabulary: int
    """Token ids are below it."""
    grammars: Grammars
    """The forms that its answers can be held to."""

    @classmethod
    def of(cls, tokenizer: Any, config: Any, generation: Any) -> Speech:
        """Of a model's tokenizer, config and generation config, which may be None. Raises as `load`."""
        _require_one_vocabulary(tokenizer, config)
        ends, text = _stop_ids(tokenizer, generation, config), config.get_text_config()
        context = int(getattr(text, "max_position_embeddings", None) or _UNKNOWN_CONTEXT)
        size = int(text.vocab_size)
        template, grammars = ChatTemplate(tokenizer, ends), Grammars(tokenizer, ends, size)
        return cls(tokenizer, template, ends, context, size, grammars)

    @classmethod
    def load(cls, source: str | Path) -> Speech:
        """Load tokenizer and config of a causal LM, without its weights.

        Raises RequestError when there is no such model or it cannot be used for chat.
        """
        from transformers import AutoConfig, GenerationConfig

        name, file = pretrained(source)
        try:
            tokenizer = load_tokenizer(name, file)
            config = AutoConfig.from_pretrained(name, **file)
        except LOADING_ERRORS as error:
            raise not_loaded(source, error) from error
        try:
            generation: Any = GenerationConfig.from_pretrained(name)
        except OSError:
            generation = None  # The file is optional; the config names the tokens then.
        return cls.of(tokenizer, config, generation)


def load_tokenizer(name: str, file: Mapping[str, str]) -> Any:
    """The tokenizer of a model that `pretrained` has found. Raises LOADING_ERRORS.

    A GGUF file names the way that its tokenizer cuts a text, and transformers does not know all of them: it
    takes GPT-2's then. A vocabulary without digits that stand together was made of single digits.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name, **file)
    if file and not any(map(_DIGITS_TOGETHER.match, tokenizer.get_vocab())):
        cuts = tokenizer.backend_tokenizer.pre_tokenizer
        if isinstance(cuts, ByteLevel) and cuts.use_regex:
            digits = Digits(individual_digits=True)
            tokenizer.backend_tokenizer.pre_tokenizer = Sequence([digits, cuts])
    return tokenizer


def _require_one_vocabulary(tokenizer: Any, config: Any) -> None:
    """Raise RequestError where a tokenizer has more tokens than its model.

    Tokens that were added to it do not count: some models come with one that no text has.
    """
    has, knows = tokenizer.vocab_size, config.get_text_config().vocab_size
    if has > knows:
        raise RequestError(
            f"the tokenizer of '{tokenizer.name_or_path}' has {has} tokens, and its model {knows} "
            "(vocab_size in config.json): get tokenizer and model from one place"
        )


def _stop_ids(tokenizer: Any, *sources: Any) -> frozenset[int]:
    """The tokens that end an assistant's turn, as the model's configs `sources` and its tokenizer name them.

    Raises RequestError when none of them names any.
    """
    ids: set[int] = set()
    for source in (*sources, tokenizer):
        named = getattr(source, "eos_token_id", None)
        ids.update([named] if isinstance(named, int) else named or [])
    if not ids:
        raise RequestError(
            f"the model '{tokenizer.name_or_path}' names no end-of-turn token (eos_token_id); set it in its "
            "generation_config.json"
        )
    return frozenset(ids)
