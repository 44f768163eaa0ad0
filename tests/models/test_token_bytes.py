"""A token's bytes are those that it adds to a text, whatever kind of vocabulary it is of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llguidance.hf import from_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from etude.models.rendering import token_bytes
from etude.models.tiny import build_tokenizer

WORDS = "what is é 1 + 2? naïve 😀 日本"
END = "<｜end▁of▁turn｜>"


def byte_level() -> Any:
    tokenizer = build_tokenizer([WORDS], vocab_size=300)
    tokenizer.add_special_tokens({"additional_special_tokens": [END]})
    return tokenizer


def byte_fallback(*more: Any) -> Any:
    """As Llama 2 and Gemma have it: blanks are signs, and what is in no token is bytes."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "the", "é", "\ufffd", "h"]
    model = models.BPE(
        {name: id for id, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more]
    )
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|end|>")


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "bytes": byte_level,
    "fallback": byte_fallback,
    "fallback without the first blank": lambda: byte_fallback(decoders.Strip(" ", 1, 0)),
}


@pytest.fixture(scope="module", params=TOKENIZERS.values(), ids=TOKENIZERS.keys())
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return request.param()


def test_they_are_those_that_llguidance_knows(tokenizer: Any) -> None:
    known = from_tokenizer(tokenizer)
    found = {token: token_bytes(tokenizer, token) for token in range(len(tokenizer))}
    # With this byte, which is in no text, it marks special tokens.
    [marked] = [token for token, bytes in found.items() if bytes == b"\xff"]
    assert found == {token: known.decode_bytes([token]) for token in found} | {marked: b"\xff"}
