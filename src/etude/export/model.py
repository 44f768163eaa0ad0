"""A version of a run's model as a folder, with a card that says what it is.

The card is README.md with the front matter that model hubs read, made of the facts of the run. It is meant
for others, and names no folder of this machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etude.config.document import dig
from etude.core.errors import RequestError
from etude.core.history import Entry, History
from etude.loop.model import load_version
from etude.report.words import evaluators_in
from etude.store.facts import facts_of, histories_of
from etude.store.figures import collapse_in, figure_of, shown_figure, shown_score, version_of
from etude.store.files import draft_of
from etude.store.stored_config import stored_data, trained_parts
from etude.store.versions import RunVersion

_PACKAGES = ("etude", "torch", "transformers", "peft", "accelerate", "safetensors", "tokenizers")

_USE = """## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

{load}
tokenizer = AutoTokenizer.from_pretrained(FOLDER)  # or the name of the repository that this is in
```
"""
_LOAD = "model = AutoModelForCausalLM.from_pretrained(FOLDER)"
_LOAD_LORA = """from peft import PeftModel

base = AutoModelForCausalLM.from_pretrained(BASE)  # the base model named above
model = PeftModel.from_pretrained(base, FOLDER)"""


def model_card(wanted: RunVersion, is_lora: bool, license: str | None) -> str:
    """Markdown with the front matter that model hubs read.

    `license` is as the hub writes it, `apache-2.0`, and None where nobody said.
    """
    from huggingface_hub import ModelCard

    history = histories_of(wanted.run)[wanted.target]
    lines = [*_introduction(wanted, history, is_lora, license), *_results(history, wanted)]
    lines += [_USE.format(load=_LOAD_LORA if is_lora else _LOAD), *_making(wanted)]
    front = _front_matter(wanted, is_lora, license).to_yaml()
    return str(ModelCard(f"---\n{front}\n---\n\n" + "\n".join(lines), ignore_metadata_errors=True))


def _front_matter(wanted: RunVersion, is_lora: bool, license: str | None) -> Any:
    from huggingface_hub import ModelCardData

    data = stored_data(wanted.run)
    parts = trained_parts(data, wanted.target)
    dataset = dig(data, ("eval", "general", "dataset"))
    is_of_hub = isinstance(dataset, dict) and dataset.get("_type") == "huggingface"
    return ModelCardData(
        license=license,
        library_name="peft" if is_lora else "transformers",
        pipeline_tag="text-generation",
        # A folder of this machine means nothing to anybody else.
        base_model=parts["base"] if _is_on_hub(parts["base"]) else None,
        datasets=[dataset["path"]] if is_of_hub and _is_on_hub(dataset["path"]) else None,
        tags=["etude", *filter(None, (parts["method"],))],
    )


def _is_on_hub(name: str | None) -> bool:
    """Whether this may be the name of a model or dataset: it is no folder, and no model made on the spot."""
    return name not in (None, "tiny") and re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", str(name)) is not None


def _introduction(wanted: RunVersion, history: History, is_lora: bool, license: str | None) -> Iterator[str]:
    facts, parts = facts_of(wanted.run), trained_parts(stored_data(wanted.run), wanted.target)
    base = parts["base"]
    version = f"version {wanted.number}" if wanted.number else "the base model"
    target = "" if wanted.target is None else f", {wanted.target}"
    yield f"# {facts.name}{target}, {version}\n"
    what = "LoRA weights" if is_lora else "Weights"
    yield f"{what} of an agent's model, trained with Etude from the agent's own runs.\n"
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
    if license is None:
        yield "No license was stated with this export; the base model's may hold for it.\n"


def _results(history: History, wanted: RunVersion) -> Iterator[str]:
    yield "## Results\n"
    entries: list[Entry] = [*history.measured] or [*history.epochs]
    of_this = [entry for entry in entries if wanted.number and version_of(entry) == wanted.number]
    shown = entries[:1] + [entry for entry in of_this[-1:] if entry != entries[0]]
    figures = [figure_of(entry) for entry in shown]
    if figures:
        names = evaluators_in(figures)
        rows = [
            (
                figure["measured"],
                shown_figure(figure),
                *(shown_score(figure["evaluators"].get(name)) for name in names),
            )
            for figure in figures
        ]
        yield from _table(("measured on", "reward, with its 95 % interval", *names), rows)
    if history.validations:
        yield "The version with the best validation is chosen by these numbers, which flatters it a little.\n"
    if not of_this and wanted.number:
        yield "This version was not measured.\n"
    collapse = collapse_in(history)
    if collapse is not None:
        yield f"Warning: {collapse}.\n"


def _making(wanted: RunVersion) -> Iterator[str]:
    file = wanted.run / "environment.json"
    environment = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    packages = environment.get("packages") or {}
    rows = [(name, packages[name]) for name in _PACKAGES if name in packages]
    rows += [(key, environment[key]) for key in ("python", "platform", "seed") if environment.get(key)]
    if rows:
        yield "## Made with\n"
        yield from _table(("", ""), rows)


def _table(columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


CARD = "README.md"


def export_model(
    wanted: RunVersion, folder: Path, *, lora_only: bool = False, license: str | None = None
) -> list[str]:
    """Write weights, tokenizer and a model card (README.md) into `folder`; the names of the files.

    The weights are safetensors, those of the whole model, or with `lora_only` the LoRA weights alone.
    `license` is for the card.

    Raises RequestError when there are none or `folder` holds something else, StoreError when it cannot be
    written.
    """
    names = {file.name for file in folder.iterdir()} if folder.is_dir() else set[str]()
    is_other = bool(names) and not {"tokenizer_config.json", CARD} <= names
    if is_other or (folder.exists() and not folder.is_dir()):
        raise RequestError(
            f"{folder} is there already and holds no exported model; choose another with --out"
        )
    policy = load_version(wanted, quantized=False)
    if lora_only and not policy.is_lora:
        raise RequestError(
            f"run {wanted.run.name} trained all weights and no LoRA weights; export it without --lora"
        )
    card = model_card(wanted, lora_only, license)
    # It is made to be given away.
    with draft_of(folder, private=False) as draft:
        policy.export(draft, merge=not lora_only)
        (draft / CARD).write_text(card, encoding="utf-8")
        for file in draft.iterdir():
            file.chmod((draft / CARD).stat().st_mode)  # safetensors writes for the user alone.
    return sorted(file.name for file in folder.iterdir())
