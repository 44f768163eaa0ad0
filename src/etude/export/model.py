"""A version of a run's model as a folder that other programs load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from etude.core.errors import RequestError
from etude.export.model_card import model_card
from etude.loop.model import load_version
from etude.store.files import draft_of
from etude.store.versions import RunVersion


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """What was exported, and where to."""

    folder: Path
    version: int
    lora_only: bool
    files: tuple[str, ...]


def export_model(wanted: RunVersion, folder: Path, *, lora_only: bool = False) -> ExportedModel:
    """Write weights, tokenizer and a model card (README.md) into `folder`.

    The weights are safetensors, those of the whole model, or with `lora_only` the LoRA weights alone.
    Raises RequestError when there are none or `folder` holds something else, StoreError when it cannot
    be written.
    """
    if folder.exists() and (not folder.is_dir() or not _is_replaceable(folder)):
        raise RequestError(
            f"{folder} is there already and holds no exported model; choose another with --out"
        )
    policy = load_version(wanted)
    if lora_only and not policy.is_lora:
        raise RequestError(
            f"run {wanted.run.name} trained all weights and no LoRA weights; export it without --lora"
        )
    with draft_of(folder) as draft:
        policy.export(draft, merge=not lora_only)
        (draft / "README.md").write_text(model_card(wanted, lora_only=lora_only), encoding="utf-8")
    return ExportedModel(
        folder, wanted.number, lora_only, tuple(sorted(one.name for one in folder.iterdir()))
    )


def _is_replaceable(folder: Path) -> bool:
    """Whether a folder is empty, or an earlier export."""
    names = {one.name for one in folder.iterdir()}
    return not names or {"README.md", "tokenizer_config.json"} <= names
