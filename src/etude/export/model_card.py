"""The model card: what a trained model is, from the facts of its run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etude.config.document import dump
from etude.core.history import History
from etude.export.places import without_places
from etude.report.figure_lines import evaluators_in, shown_score
from etude.store.facts import facts_of, histories_of
from etude.store.figures import Entry, figure_of, version_of, with_rewards
from etude.store.stored_config import CONFIG, stored_data, trained_parts
from etude.store.summary import collapse_in
from etude.store.versions import RunVersion

_PACKAGES = ("etude", "torch", "transformers", "peft", "accelerate", "safetensors", "tokenizers")


def model_card(wanted: RunVersion, *, lora_only: bool = False) -> str:
    """Markdown with the front matter that model hubs read.

    It names no place on this machine, and has the config as the run folder keeps it: without secrets.
    """
    return "\n".join(
        [
            *_front_matter(wanted, lora_only),
            *_introduction(wanted, lora_only),
            *_results(histories_of(wanted.run)[wanted.target], wanted),
            *_use(lora_only),
            *_making(wanted),
        ]
    )


def _front_matter(wanted: RunVersion, lora_only: bool) -> Iterator[str]:
    parts = _parts(wanted)
    yield "---"
    yield f"library_name: {'peft' if lora_only else 'transformers'}"
    yield "pipeline_tag: text-generation"
    # A folder of this machine means nothing to anybody else.
    if parts["base"] is not None and not Path(parts["base"]).is_absolute():
        yield f"base_model: {json.dumps(parts['base'])}"
    yield f"tags: [etude{', ' + parts['method'] if parts['method'] else ''}]"
    yield "---\n"


def _introduction(wanted: RunVersion, lora_only: bool) -> Iterator[str]:
    facts, parts = facts_of(wanted.run), _parts(wanted)
    what = "LoRA weights" if lora_only else "Weights"
    version = f"version {wanted.number}" if wanted.number else "the base model"
    whose = "" if wanted.target is None else f", {wanted.target}"
    yield f"# {facts.name}{whose}, {version}\n"
    yield f"{what} of an agent's model, trained with Etude from the agent's own runs.\n"
    base = parts["base"]
    rows = {
        "base model": Path(base).name if base and Path(base).is_absolute() else base,
        "trajectory builder": parts["method"],
        "trained by": parts["backend"],
        "epochs of the run": f"{facts.epochs_done} of {facts.num_epochs}",
        "version": str(wanted.number),
        "digest of the trained weights": wanted.version.digest if wanted.version else None,
    }
    yield from _table(("", ""), [(key, value) for key, value in rows.items() if value is not None])


def _parts(wanted: RunVersion) -> dict[str, Any]:
    return trained_parts(stored_data(wanted.run), wanted.target)


def _results(history: History, wanted: RunVersion) -> Iterator[str]:
    yield "## Results\n"
    entries: list[Entry] = [*history.validations] or [*history.epochs]
    if not with_rewards(entries):
        yield "Nothing was measured.\n"
        return
    of_this = [entry for entry in entries if wanted.number and version_of(entry) == wanted.number]
    figures = [("before training" if version_of(entries[0]) in (0, None) else "first", figure_of(entries[0]))]
    if of_this:
        figures.append((f"this model (version {wanted.number})", figure_of(of_this[-1])))
    yield from _table(("", "reward", "95 % interval", "n"), [_result(*figure) for figure in figures])
    names = evaluators_in([figure for _, figure in figures])
    if names:
        rows = [
            (label, *(shown_score(figure["evaluators"].get(name)) for name in names))
            for label, figure in figures
        ]
        yield from _table(("", *names), rows)
    yield (
        "Measured on the validation examples, one episode each. The version with the best validation is "
        "chosen by the same numbers, so that they flatter it a little.\n"
        if history.validations
        else "Measured on the episodes that the run collected for training: there was no validation set.\n"
    )
    if not of_this and wanted.number:
        yield "This version was not measured.\n"
    collapse = collapse_in(history)
    if collapse is not None:
        yield f"Warning: {collapse}.\n"


def _result(label: str, figure: dict[str, Any]) -> tuple[Any, ...]:
    low, high, reward = (figure[key] for key in ("reward_low", "reward_high", "avg_reward"))
    interval = "" if low is None or high is None else f"{low:.3f} to {high:.3f}"
    return label, "none" if reward is None else f"{reward:.3f}", interval, figure["n"]


def _use(lora_only: bool) -> Iterator[str]:
    yield "## Use\n"
    yield "```python"
    yield "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
    if lora_only:
        yield "from peft import PeftModel\n"
        yield "base = AutoModelForCausalLM.from_pretrained(BASE)  # the base model named above"
        yield "model = PeftModel.from_pretrained(base, FOLDER)  # this folder"
    else:
        yield "model = AutoModelForCausalLM.from_pretrained(FOLDER)  # this folder"
    yield "tokenizer = AutoTokenizer.from_pretrained(FOLDER)"
    yield "```\n"


def _making(wanted: RunVersion) -> Iterator[str]:
    yield "## How it was made\n"
    file = wanted.run / "environment.json"
    environment = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    packages = environment.get("packages") or {}
    rows = [(name, packages[name]) for name in _PACKAGES if name in packages]
    rows += [(key, environment[key]) for key in ("python", "platform", "seed") if environment.get(key)]
    if rows:
        yield from _table(("", ""), rows)
    config = wanted.run / CONFIG
    if config.is_file():
        yield "The config, with every default filled in, and without secrets and places on the machine:\n"
        yield f"```yaml\n{dump(without_places(stored_data(wanted.run), wanted.run)).strip()}\n```\n"


def _table(columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in row)} |"
    yield ""
