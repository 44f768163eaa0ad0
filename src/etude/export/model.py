"""A version of a run's model as a folder that other programs load, with a card that says what it is."""

from __future__ import annotations

from pathlib import Path

from etude.core.errors import RequestError
from etude.export.card import Kind, model_card, model_name
from etude.export.gguf import Conversion, convert
from etude.loop.model import load_version
from etude.store.files import draft_of
from etude.store.versions import RunVersion

CARD = "README.md"


def export_model(
    wanted: RunVersion,
    folder: Path,
    *,
    lora_only: bool = False,
    gguf: Conversion | None = None,
    repository: str | None = None,
    license: str | None = None,
) -> list[str]:
    """Write weights, tokenizer and a model card (README.md) into `folder`; the names of the files.

    The weights are safetensors, those of the whole model, or with `lora_only` the LoRA weights alone; with
    `gguf` they are one file for llama.cpp. `repository` and `license` are for the card.

    Raises RequestError when there are none or `folder` holds something else, StoreError when it cannot be
    written, EtudeError when llama.cpp does not take the model.
    """
    require_replaceable(folder)
    policy = load_version(wanted, quantized=False)
    if lora_only and not policy.is_lora:
        raise RequestError(
            f"run {wanted.run.name} trained all weights and no LoRA weights; export it without --lora"
        )
    kind: Kind = "gguf" if gguf is not None else "lora" if lora_only else "merged"
    card = model_card(wanted, kind, repository, license)
    # It is made to be given away.
    with draft_of(folder, private=False) as draft:
        if gguf is None:
            policy.export(draft, merge=not lora_only)
        else:
            convert(policy.export, draft, model_name(wanted), gguf)
        (draft / CARD).write_text(card, encoding="utf-8")
        for file in draft.iterdir():
            file.chmod((draft / CARD).stat().st_mode)  # safetensors writes for the user alone.
    return sorted(file.name for file in folder.iterdir())


def require_replaceable(folder: Path) -> None:
    """Raise RequestError unless there is nothing in a folder, or an earlier export."""
    if not folder.exists():
        return
    names = {file.name for file in folder.iterdir()} if folder.is_dir() else {""}
    is_model = any(name == "tokenizer_config.json" or name.endswith(".gguf") for name in names)
    if names and not (is_model and CARD in names):
        raise RequestError(
            f"{folder} is there already and holds no exported model; choose another with --out"
        )
