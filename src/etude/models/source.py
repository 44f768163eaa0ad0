"""The source of a model (a folder, a GGUF file, or a name on the hub) and a run's record of its files."""

import asyncio
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from etude.core.errors import RequestError, first_line, nearest
from etude.store.files import TO_EXPORT, WEIGHTS_FILE, file_digest
from etude.store.journal import Journal
from etude.store.run_folder import BASE_STEPS

PACKAGED = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The model in new projects. A Python package ships it too, for machines that cannot reach the hub."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_CONFIG, _LORA_CONFIG = "config.json", "adapter_config.json"
_TO_MEND = "put the model's files there, or name another model"


def locate(source: str | Path) -> str:
    """Return a model's folder or GGUF file, or its name on the hub.

    Asks the hub once, and only if the source cannot be meant as a path. If the hub cannot be reached,
    returns the folder in its cache. Raises RequestError if there is no such folder or file, or if the hub
    does not answer and its cache has no such model. Loads neither torch nor transformers.
    """
    _require_path(source)
    name, path = str(source), local_path(source)
    if path is not None:
        return str(path)
    from huggingface_hub import constants, get_session

    why = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        try:
            # One request, because `transformers` would retry for most of a minute.
            get_session().head(constants.ENDPOINT, timeout=5.0)
            return name
        except Exception as error:  # noqa: BLE001  which library asks is the hub client's choice
            why = f"{constants.ENDPOINT}: {first_line(error)}"
    cached = cached_folder(name)
    if cached is None and name == PACKAGED and packaged_folder().is_dir():
        return str(packaged_folder())
    if cached is None:
        remedy = "; make it with: python -m etude.models.packaged (in a checkout: make real-model)"
        raise RequestError(
            f"there is no folder '{name}' and no such model in the cache of the Hugging Face hub, "
            f"and the hub cannot be reached: {why}{remedy if name == PACKAGED else ''}"
        )
    return str(cached)


def packaged_folder() -> Path:
    """Return the folder in the user's cache where `etude.models.packaged` puts its model."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "etude" / "models" / PACKAGED.rpartition("/")[2]


def pretrained_arguments(source: str | Path) -> tuple[str, dict[str, str]]:
    """Return the arguments of `from_pretrained` for a model: folder or name, and a GGUF file's name.

    Raises errors as `locate` does.
    """
    name = locate(source)
    return (str(Path(name).parent), {"gguf_file": Path(name).name}) if is_gguf(name) else (name, {})


def is_gguf(source: str | Path) -> bool:
    """Return whether a model is a single self-contained file, in llama.cpp's format."""
    path = _expand(source)
    return path.suffix.lower() == ".gguf" and os.path.isfile(path)  # noqa: PTH113


def local_path(source: str | Path) -> Path | None:
    """Return the folder or GGUF file that `source` names, with `~` expanded, or None if there is none."""
    path = _expand(source)
    # pathlib's version raises if it lacks permission, and for names that are too long.
    return path if os.path.isdir(path) or is_gguf(path) else None  # noqa: PTH112


def _require_path(source: str | Path) -> None:
    """Raise RequestError if `source` is meant as a path and there is no model.

    A source is a path if it cannot be a name on the hub, or if its first folder exists.
    """
    path, name = _expand(source), str(source)
    if os.path.isdir(path):  # noqa: PTH112
        if (path / _LORA_CONFIG).is_file():
            why = (
                "that folder holds LoRA weights, not a model: merge them into their base, as `etude export` "
                "does without --lora"
            )
        elif (path / _CONFIG).is_file():
            return
        elif (path / WEIGHTS_FILE).is_file():
            why = f"that folder has only the tensors that training changed; {TO_EXPORT}"
        else:
            why = f"there is no {_CONFIG} in that folder; {_TO_MEND}"
    elif is_gguf(path):
        return
    elif os.path.exists(path):  # noqa: PTH110
        why = "a model is a folder, or a file that ends in .gguf"
    else:
        first, slash, _ = name.partition("/")
        if isinstance(source, str) and _HUB_NAME.fullmatch(name) and not (slash and os.path.isdir(first)):  # noqa: PTH112
            return
        why = f"the folder does not exist; {TO_EXPORT if ':' in name else _TO_MEND}"
        with suppress(OSError):
            if close := nearest(path.name, [each.name for each in path.parent.iterdir()]):
                why += f"; did you mean '{path.with_name(close)}'?"
    raise RequestError(f"cannot load the model '{name}': {why}")


def _expand(source: str | Path) -> Path:
    return Path(os.path.expanduser(source))  # noqa: PTH111  pathlib's raises where there is no such user


def cached_folder(name: str) -> Path | None:
    """Return the folder of a model in the hub's cache, or None if it is not cached."""
    from huggingface_hub import try_to_load_from_cache

    with suppress(ValueError):  # of a name that the hub does not allow
        config = try_to_load_from_cache(name, _CONFIG)
        return Path(config).parent if isinstance(config, str) else None
    return None


_SUFFIXES = frozenset({".safetensors", ".gguf", ".bin", ".json", ".jinja", ".model", ".txt"})
"""File suffixes of weights, configs, tokenizers and templates."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TOLD, _DIGITS = 3, 12


async def keep_base(journal: Journal, name: str, source: str) -> None:
    """Record the files that the entry `name` of `llms` was loaded from, or verify an earlier record.

    Raises RequestError as `require_base` does.
    """
    if not await asyncio.to_thread(require_base, journal, name, source):
        await journal.put(f"{BASE_STEPS}{name}", await asyncio.to_thread(_file_digests, source))


def require_base(journal: Journal, name: str, source: str) -> bool:
    """Return whether a model's files are recorded, after verifying that they have not changed.

    Raises RequestError that names the changed or missing files. Files that were added since the run began
    are ignored.
    """
    before: dict[str, Any] | None = journal.get(f"{BASE_STEPS}{name}")
    if before is None:
        return False
    now = _file_digests(source)
    changes = [
        f"{name} is missing"
        if name not in now["files"]
        else f"{name} has changed (its SHA-256 is {now['files'][name][:_DIGITS]}… and was {was[:_DIGITS]}…)"
        for name, was in before["files"].items()
        if now["files"].get(name) != was
    ]
    if changes:
        commits = before["commit"], now["commit"]
        hub = f" (its commit was {commits[0]}, and is {commits[1]})" if all(commits) else ""
        more = f" and {len(changes) - _TOLD} others" if len(changes) > _TOLD else ""
        raise RequestError(
            f"llms.{name}: the base model '{source}' is not what this run began from{hub}: "
            f"{'; '.join(changes[:_TOLD])}{more}. Put those files back, or start a new run"
        )
    return True


def _file_digests(source: str) -> dict[str, Any]:
    _require_path(source)
    place, digests = local_path(source) or cached_folder(source), dict[str, str]()
    files = [] if place is None else [place] if place.is_file() else sorted(place.iterdir())
    for path in files:
        if path.suffix in _SUFFIXES and path.is_file():
            # Large files in the hub's cache have their SHA-256 as name.
            name = path.resolve().name
            digests[path.name] = name if _SHA256.fullmatch(name) else file_digest(path)
    commit = place.name if place is not None and _COMMIT.fullmatch(place.name) else None
    return {"source": source, "commit": commit, "files": digests}
