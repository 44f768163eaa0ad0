"""The tokens that end an assistant's turn."""

from __future__ import annotations

from typing import Any

from etude.core.errors import RequestError


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
