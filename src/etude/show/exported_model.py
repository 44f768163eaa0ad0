"""A model version as a folder that `transformers`, the Hugging Face hub and llama.cpp's converter take.

Its model card is README.md with the front matter that model hubs read, made from the run's facts. It is for
publication, and names no folder of this machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from etude.core.errors import RequestError
from etude.core.history import Entry, History
from etude.loop.stored_models import load_version
from etude.store.facts import RunFacts, read_facts
from etude.store.figures import collapse_in
from etude.store.files import open_draft
from etude.store.stored_config import stored_data, trained_parts
from etude.store.versions import RunVersion

CARD = "README.md"


def model_card(wanted: RunVersion, lora_only: bool) -> str:
    """Return a model card in Markdown."""
    from huggingface_hub import ModelCard, ModelCardData

    facts = read_facts(wanted.run, required=True)
    parts = trained_parts(stored_data(wanted.run), wanted.target)
    front = ModelCardData(
        library_name="peft" if lora_only else "transformers",
        pipeline_tag="text-generation",
        # A folder of this machine means nothing elsewhere.
        base_model=parts["base"] if _is_on_hub(parts["base"]) else None,
        tags=["etude", *filter(None, (parts["method"],))],
    )
    lines = [
        *_introduction(wanted, parts, facts, lora_only),
        *_results(facts.histories[wanted.target], wanted),
    ]
    return str(ModelCard(f"---\n{front.to_yaml()}\n---\n\n" + "\n".join(lines), ignore_metadata_errors=True))


def _is_on_hub(name: str | None) -> bool:
    """Return whether this may be a model on the hub, not a folder or the built-in `tiny`."""
    return name not in (None, "tiny") and re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", str(name)) is not None


def _introduction(
    wanted: RunVersion, parts: Mapping[str, Any], facts: RunFacts, lora_only: bool
) -> Iterator[str]:
    history, base = facts.histories[wanted.target], parts["base"]
    version = f"version {wanted.number}" if wanted.number else "the base model"
    target = "" if wanted.target is None else f", {wanted.target}"
    yield f"# {facts.name}{target}, {version}\n"
    kind = "LoRA weights" if lora_only else "Weights"
    yield f"{kind} of an agent's model, trained with Etude from the agent's own runs.\n"
    made = [entry for entry in history.trained if entry.version and entry.version.number <= wanted.number]
    rows = {
        "base model": Path(base).name if base and Path(base).is_absolute() else base,
        "trajectory builder": parts["method"],
        "episodes trained from": sum(int(entry.metrics.get("episodes") or 0) for entry in made),
        "trained by": parts["backend"],
        "epochs of the run": f"{facts.epochs_done} of {facts.num_epochs}",
        "version": str(wanted.number),
        "digest of the trained weights": wanted.version.digest if wanted.version else None,
    }
    yield from _table(("", ""), [(key, value) for key, value in rows.items() if value is not None])
    yield "This export states no license. The base model's license may apply.\n"


def _results(history: History, wanted: RunVersion) -> Iterator[str]:
    entries: list[Entry] = [*history.measured] or [*history.epochs]
    of_this = [entry for entry in entries if wanted.number and entry.measured_with == wanted.number]
    shown = entries[:1] + [entry for entry in of_this[-1:] if entry != entries[0]]
    rows = [(entry.measured_on, entry.reward.counted) for entry in shown]
    yield from _table(("measured on", "reward, with its 95 % interval"), rows)
    if history.validations:
        yield "The best version was chosen by these numbers, so they are slightly too good.\n"
    if not of_this and wanted.number:
        yield "This version was not measured.\n"
    collapse = collapse_in(history)
    if collapse is not None:
        yield f"Warning: {collapse}.\n"


def _table(columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


def export_model(wanted: RunVersion, folder: Path, *, lora_only: bool = False) -> list[str]:
    """Write weights, tokenizer and a model card (README.md) into `folder`. Return the names of the files.

    The weights are safetensors of the whole model, or with `lora_only` of the LoRA weights only. Raises
    RequestError if there are no such weights or `folder` holds something else, and StoreError if it cannot be
    written.
    """
    _require_replaceable(folder)
    policy = load_version(wanted)
    if lora_only and not policy.is_lora:
        raise RequestError(
            f"run {wanted.run.name} trained all weights and no LoRA weights; export it without --lora"
        )
    card = model_card(wanted, lora_only)
    # The export is for publication.
    with open_draft(folder, private=False) as draft:
        policy.export(draft, merge=not lora_only)
        (draft / CARD).write_text(card, encoding="utf-8")
        for file in draft.iterdir():
            file.chmod((draft / CARD).stat().st_mode)  # safetensors makes files readable by the user only.
    return sorted(file.name for file in folder.iterdir())


def _require_replaceable(folder: Path) -> None:
    """Raise RequestError unless a folder is empty, missing, or an earlier export."""
    if not folder.exists():
        return
    names = {file.name for file in folder.iterdir()} if folder.is_dir() else {""}
    if names and not {"tokenizer_config.json", CARD} <= names:
        raise RequestError(
            f"{folder} is there already and holds no exported model; choose another with --out"
        )
