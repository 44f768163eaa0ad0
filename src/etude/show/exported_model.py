"""A model version as a folder that `transformers`, the Hugging Face hub and llama.cpp's converter take.

Its model card is README.md with the front matter that model hubs read, made from the run's facts. It is for
publication, and names no folder of this machine.
"""

import re
from pathlib import Path

from etude.backends.trainer_adapter import LocalAdapterConfig
from etude.core.errors import RequestError
from etude.core.history import Entry
from etude.loop.evaluation import load_version
from etude.store.facts import RunVersion, read_facts
from etude.store.files import open_draft
from etude.store.stored_config import model_config, stored_data, trained_parts

CARD = "README.md"


def model_card(wanted: RunVersion, lora_only: bool) -> str:
    """Return a model card in Markdown."""
    from huggingface_hub import ModelCard, ModelCardData

    history = read_facts(wanted.run, required=True).histories[wanted.target]
    parts = trained_parts(stored_data(wanted.run), wanted.target)
    base = parts["base"] or ""
    # A folder of this machine, or the built-in `tiny`, means nothing elsewhere.
    is_on_hub = base != "tiny" and re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", base) is not None
    front = ModelCardData(
        library_name="peft" if lora_only else "transformers",
        pipeline_tag="text-generation",
        base_model=base if is_on_hub else None,
        tags=["etude", *filter(None, (parts["method"],))],
    )
    entries: list[Entry] = [*history.all_validations] or [*history.epochs]
    of_this = [entry for entry in entries if wanted.number and entry.measured_with == wanted.number]
    shown = entries[:1] + [entry for entry in of_this[-1:] if entry != entries[0]]
    target = "" if wanted.target is None else f", {wanted.target}"
    version = f"version {wanted.number}" if wanted.number else "the base model"
    name = Path(base).name if Path(base).is_absolute() else base
    lines = [
        f"# {wanted.run.name}{target}, {version}\n",
        f"{'LoRA weights' if lora_only else 'Weights'} of an agent's model, trained with Etude from the "
        f"agent's own runs. The base model is {name or 'not known'}. Rewards have their 95 % interval.\n",
        *(f"- {entry.measured_on}: reward {entry.reward.with_count}" for entry in shown),
        "\nThis export states no license. The base model's license may apply.\n",
    ]
    if history.validations:
        lines.append("The best version was chosen by these numbers, so they are slightly too good.\n")
    if not of_this and wanted.number:
        lines.append("This version was not measured.\n")
    return str(ModelCard(f"---\n{front.to_yaml()}\n---\n\n" + "\n".join(lines), ignore_metadata_errors=True))


def require_lora(wanted: RunVersion) -> None:
    """Raise RequestError if the version has no LoRA weights. It need not be on the disk."""
    adapter = next(iter(model_config(wanted.run, wanted.target).trainer_adapters.values()), None)
    lora = adapter.lora if isinstance(adapter, LocalAdapterConfig) else None
    if lora is None or wanted.version is None:
        raise RequestError(f"{wanted} has no LoRA weights; export the whole model")


def export_model(wanted: RunVersion, folder: Path, *, lora_only: bool = False) -> list[str]:
    """Write weights, tokenizer and a model card (README.md) into `folder`. Return the names of the files.

    The weights are safetensors of the whole model, or with `lora_only` of the LoRA weights only. Raises
    RequestError if there are no such weights or `folder` holds something else, and StoreError.
    """
    folder = folder.expanduser().resolve()  # A link stays, and the folder that it names is written.
    is_own = folder != Path.cwd() and folder.is_dir()
    there = [*folder.iterdir()] if is_own else [folder] if folder.exists() else []
    names = {each.name for each in there}
    if lora_only:
        require_lora(wanted)
    policy = load_version(wanted)
    card = model_card(wanted, lora_only)
    # The export is for publication.
    with open_draft(folder, private=False) as draft:
        policy.export(draft, merge=not lora_only)
        (draft / CARD).write_text(card, encoding="utf-8")
        if names and not {"tokenizer_config.json", CARD} <= names <= {file.name for file in draft.iterdir()}:
            raise RequestError(
                f"{folder} already exists, and is no such export; choose another folder (the option --out)"
            )
        for file in draft.iterdir():
            file.chmod((draft / CARD).stat().st_mode)  # safetensors makes files readable by the user only.
    return sorted(file.name for file in folder.iterdir())
