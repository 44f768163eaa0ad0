"""The texts of single tokens, by the tokenizer file of a run's model where it is on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from etude.inference.local import base_folder

_FILE = "tokenizer.json"


class TokenTexts:
    """Texts of tokens; those of a tokenizer that is not here are their ids."""

    def __init__(self, run: Path, settings: Mapping[str, Any], model: str) -> None:
        """`settings` is the run's config, and `model` an entry of its `llms`."""
        entry = (settings.get("llms") or {}).get(model)
        entry = entry if isinstance(entry, Mapping) else {}
        source = str(entry.get("tokenizer") or entry.get("model") or entry.get("model_name") or "")
        self._file = _tokenizer_file(run, model, source)

    @property
    def is_known(self) -> bool:
        """Whether there is a tokenizer."""
        return self._file is not None

    def of(self, ids: Sequence[int]) -> list[str]:
        """The text of each token; of one that is a part of a character, the sign for that."""
        if self._file is None:
            return [f"⟨{id}⟩" for id in ids]
        texts: list[str] = _tokenizer(self._file).decode_batch(
            [[id] for id in ids], skip_special_tokens=False
        )
        return texts


def _tokenizer_file(run: Path, model: str, source: str) -> Path | None:
    """Where the tokenizer of a model is, without asking the network."""
    # A tiny model is made in the run folder.
    for folder in (base_folder(run, model), Path(source).expanduser() if source else run):
        if (folder / _FILE).is_file() and _has_tokenizers():
            return folder / _FILE
    if not source or source.startswith(("/", ".", "~")) or not _has_tokenizers():
        return None
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(source, _FILE)
    except (ImportError, ValueError):  # The extra is not installed, or that is no name on the hub.
        return None
    return Path(cached) if isinstance(cached, str) else None


def _has_tokenizers() -> bool:
    from importlib.util import find_spec

    return find_spec("tokenizers") is not None


@lru_cache(maxsize=4)
def _tokenizer(file: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file))
