"""The bytes of single tokens, also of those that are a part of a character."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from etude.models.reply import decoded

_REPLACEMENT = "\ufffd"
_ONE_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""How vocabularies that fall back to bytes call a token that is one."""


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """The bytes that a token adds to a text in the middle; a special token's are those of its name."""
    alone = decoded(tokenizer, [token])
    if _REPLACEMENT not in alone:
        # Some tokenizers leave the blank before a text's first word out.
        return decoded(tokenizer, [token, token]).removeprefix(alone).encode()
    name = str(tokenizer.convert_ids_to_tokens(token))
    if match := _ONE_BYTE.fullmatch(name):
        return bytes.fromhex(match[1])
    signs = _byte_signs()
    return bytes(map(signs.__getitem__, name)) if signs.keys() >= {*name} else alone.encode()


@cache
def _byte_signs() -> dict[str, int]:
    """The byte that each sign stands for in the tokens of a byte-level vocabulary, as GPT-2's."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {sign: byte for byte, sign in bytes_to_unicode().items()}
