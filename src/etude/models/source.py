"""Where a model comes from: a folder, or a name on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from etude.core.errors import RequestError


def require_source(source: str | Path) -> None:
    """Raise RequestError when `source` is written as a folder and there is none."""
    if _looks_like_path(source) and not Path(source).expanduser().is_dir():
        raise RequestError(f"there is no model at '{source}': the folder does not exist")


def not_loaded(source: str | Path, error: Exception) -> RequestError:
    """The error to raise when `transformers` cannot load a model, in one line."""
    lines = str(error).strip().splitlines()
    reason = lines[0] if lines else type(error).__name__
    if Path(source).is_dir():
        return RequestError(f"cannot load the model '{source}': {reason}")
    return RequestError(
        f"there is no folder '{source}', and from the Hugging Face hub it cannot be loaded: {reason}"
    )


def _looks_like_path(source: str | Path) -> bool:
    text = str(source)
    return isinstance(source, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1
