"""The card of an exported model: README.md with the front matter that model hubs read.

It is made of the facts of its run. It is meant for others: it names no folder of this machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

from etude.config.document import dig
from etude.core.history import Entry, History
from etude.report.words import evaluators_in
from etude.store.facts import facts_of, histories_of
from etude.store.figures import figure_of, shown_figure, shown_score, version_of
from etude.store.stored_config import stored_data, trained_parts
from etude.store.summary import collapse_in
from etude.store.versions import RunVersion

_PACKAGES = ("etude", "torch", "transformers", "peft", "accelerate", "safetensors", "tokenizers")

Kind: TypeAlias = Literal["merged", "lora", "gguf"]
"""The whole model, its LoRA weights alone, or a file for llama.cpp."""

_USE = """## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

{load}
tokenizer = AutoTokenizer.from_pretrained({place})
```
"""
_LOAD = "model = AutoModelForCausalLM.from_pretrained({place})"
_LOAD_LORA = """from peft import PeftModel

base = AutoModelForCausalLM.from_pretrained(BASE)  # the base model named above
model = PeftModel.from_pretrained(base, {place})"""
_USE_GGUF = """## Use

```console
{fetch}$ llama-server -m FILE.gguf --jinja
```

The file has the model's own chat template. For Ollama: `echo "FROM ./FILE.gguf" > Modelfile`, and then
`ollama create {name}`, which guesses a template of its own from it.
"""
_KINDS: dict[Kind, str] = {"merged": "Weights", "lora": "LoRA weights", "gguf": "A GGUF file"}
_LIBRARIES: dict[Kind, str] = {"merged": "transformers", "lora": "peft"}


def model_card(wanted: RunVersion, kind: Kind, repository: str | None, license: str | None) -> str:
    """Markdown with the front matter that model hubs read.

    `repository` is that of the hub, where the model goes; else it is used as a folder. `license` is as the
    hub writes it, `apache-2.0`, and None where nobody said.
    """
    from huggingface_hub import ModelCard

    history = histories_of(wanted.run)[wanted.target]
    lines = [*_introduction(wanted, history, kind, license), *_results(history, wanted)]
    if kind == "gguf":
        lines.append("All of this was measured before the weights were converted to GGUF.\n")
    lines += [usage(model_name(wanted), kind, repository), *_making(wanted)]
    front = _front_matter(wanted, kind, license).to_yaml()
    return str(ModelCard(f"---\n{front}\n---\n\n" + "\n".join(lines), ignore_metadata_errors=True))


def usage(name: str, kind: Kind, repository: str | None = None) -> str:
    """The section on how a model of that name is used."""
    if kind == "gguf":
        fetch = f"$ hf download {repository} --local-dir .\n" if repository else ""
        return _USE_GGUF.format(fetch=fetch, name=name.lower())
    place = f'"{repository}"' if repository else "FOLDER"
    load = _LOAD_LORA if kind == "lora" else _LOAD
    return _USE.format(load=load.format(place=place), place=place)


def model_name(wanted: RunVersion) -> str:
    """A name for the version that programs and hubs take: `sums-v3`, `debate-prover-v3`."""
    return plain_name("-".join(filter(None, (wanted.run.name, wanted.target, f"v{wanted.number}"))))


def plain_name(name: str) -> str:
    """The name as programs and hubs take it, and as a folder may be called."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.")


def _front_matter(wanted: RunVersion, kind: Kind, license: str | None) -> Any:
    from huggingface_hub import ModelCardData

    data = stored_data(wanted.run)
    parts = trained_parts(data, wanted.target)
    dataset = dig(data, ("eval", "general", "dataset"))
    is_of_hub = isinstance(dataset, dict) and dataset.get("_type") == "huggingface"
    return ModelCardData(
        license=license,
        library_name=_LIBRARIES.get(kind),
        pipeline_tag="text-generation",
        # A folder of this machine means nothing to anybody else.
        base_model=parts["base"] if _is_on_hub(parts["base"]) else None,
        datasets=[dataset["path"]] if is_of_hub and _is_on_hub(dataset["path"]) else None,
        tags=["etude", *filter(None, (parts["method"],)), *(["gguf"] if kind == "gguf" else [])],
    )


def _is_on_hub(name: str | None) -> bool:
    """Whether this may be the name of a model or dataset: it is no folder, and no model made on the spot."""
    return name not in (None, "tiny") and re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", str(name)) is not None


def _introduction(wanted: RunVersion, history: History, kind: Kind, license: str | None) -> Iterator[str]:
    facts, parts = facts_of(wanted.run), trained_parts(stored_data(wanted.run), wanted.target)
    base = parts["base"]
    version = f"version {wanted.number}" if wanted.number else "the base model"
    target = "" if wanted.target is None else f", {wanted.target}"
    yield f"# {facts.name}{target}, {version}\n"
    yield f"{_KINDS[kind]} of an agent's model, trained with Etude from the agent's own runs.\n"
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
