"""A version of a run's model as a folder that other programs load, with a card that says what it is.

The card is made of the facts of its run. It is meant for others: it names no folder of this machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from etude.config.document import dig, dump, strings
from etude.core.errors import RequestError
from etude.core.history import Entry, History
from etude.loop.model import load_version
from etude.report.figure_lines import evaluators_in, shown_bounds, shown_score
from etude.store.facts import facts_of, histories_of
from etude.store.figures import figure_of, version_of, with_rewards
from etude.store.files import draft_of
from etude.store.stored_config import CONFIG, stored_data, trained_parts
from etude.store.summary import collapse_in
from etude.store.versions import RunVersion

_PACKAGES = ("etude", "torch", "transformers", "peft", "accelerate", "safetensors", "tokenizers")
_CONFIG_FILE = ("finetuning", "run_configuration", "config_file")


_USE = """## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

{load}
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
```
"""
_LOAD = "model = AutoModelForCausalLM.from_pretrained(FOLDER)  # this folder"
_LOAD_LORA = """from peft import PeftModel

base = AutoModelForCausalLM.from_pretrained(BASE)  # the base model named above
model = PeftModel.from_pretrained(base, FOLDER)  # this folder"""


def export_model(wanted: RunVersion, folder: Path, *, lora_only: bool = False) -> list[str]:
    """Write weights, tokenizer and a model card (README.md) into `folder`; the names of the files.

    The weights are safetensors, those of the whole model, or with `lora_only` the LoRA weights alone.
    Raises RequestError when there are none or `folder` holds something else, StoreError when it cannot
    be written.
    """
    if folder.exists() and (not folder.is_dir() or not _is_replaceable(folder)):
        raise RequestError(
            f"{folder} is there already and holds no exported model; choose another with --out"
        )
    policy = load_version(wanted, quantized=False)
    if lora_only and not policy.is_lora:
        raise RequestError(
            f"run {wanted.run.name} trained all weights and no LoRA weights; export it without --lora"
        )
    # It is made to be given away.
    with draft_of(folder, private=False) as draft:
        policy.export(draft, merge=not lora_only)
        (draft / "README.md").write_text(_model_card(wanted, lora_only), encoding="utf-8")
    return sorted(file.name for file in folder.iterdir())


def _is_replaceable(folder: Path) -> bool:
    """Whether a folder is empty, or an earlier export."""
    names = {file.name for file in folder.iterdir()}
    return not names or {"README.md", "tokenizer_config.json"} <= names


def _model_card(wanted: RunVersion, lora_only: bool) -> str:
    """Markdown with the front matter that model hubs read, and the config as the run folder keeps it."""
    lines = [*_introduction(wanted, lora_only), *_results(histories_of(wanted.run)[wanted.target], wanted)]
    use = _USE.format(load=_LOAD_LORA if lora_only else _LOAD)
    return "\n".join([*lines, use, *_making(wanted)])


def _introduction(wanted: RunVersion, lora_only: bool) -> Iterator[str]:
    facts, parts = facts_of(wanted.run), trained_parts(stored_data(wanted.run), wanted.target)
    base = parts["base"]
    is_folder = base is not None and Path(base).is_absolute()
    yield "---"
    yield f"library_name: {'peft' if lora_only else 'transformers'}"
    yield "pipeline_tag: text-generation"
    # A folder of this machine means nothing to anybody else.
    if base is not None and not is_folder:
        yield f"base_model: {json.dumps(base)}"
    yield f"tags: [etude{', ' + parts['method'] if parts['method'] else ''}]"
    yield "---\n"
    version = f"version {wanted.number}" if wanted.number else "the base model"
    target = "" if wanted.target is None else f", {wanted.target}"
    yield f"# {facts.name}{target}, {version}\n"
    weights = "LoRA weights" if lora_only else "Weights"
    yield f"{weights} of an agent's model, trained with Etude from the agent's own runs.\n"
    rows = {
        "base model": Path(base).name if base and is_folder else base,
        "trajectory builder": parts["method"],
        "trained by": parts["backend"],
        "epochs of the run": f"{facts.epochs_done} of {facts.num_epochs}",
        "version": str(wanted.number),
        "digest of the trained weights": wanted.version.digest if wanted.version else None,
    }
    yield from _table(("", ""), [(key, value) for key, value in rows.items() if value is not None])


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
    reward, interval = figure["avg_reward"], shown_bounds(figure["reward_low"], figure["reward_high"])
    return label, "none" if reward is None else f"{reward:.3f}", interval or "", figure["n"]


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
        yield "The config, with every default filled in, and without secrets and folders of the machine:\n"
        yield f"```yaml\n{dump(_without_folders(stored_data(wanted.run), wanted.run)).strip()}\n```\n"


def _table(columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


def _without_folders(data: dict[str, Any], run: Path) -> dict[str, Any]:
    """The content of a stored config with absolute paths cut down.

    A path within the project is as one would write it there, any other is only its name. Folders of this
    machine are taken out of longer texts too.
    """
    file = dig(data, _CONFIG_FILE)
    project = [str(Path(file).parent)] if isinstance(file, str) else []
    folders = [*project, str(run), str(run.parent), str(Path.cwd()), str(Path.home())]
    folders += [text for _, text in strings(data) if _is_absolute(text)]
    # The longest first, or a folder would be taken for the one that it lies in.
    known = sorted({folder for folder in folders if len(folder) > 1}, key=lambda folder: -len(folder))
    return dict(_mapped(data, lambda text: _shortened(text, project, known)))


def _shortened(text: str, project: Sequence[str], known: Sequence[str]) -> str:
    if _is_absolute(text):
        for folder in project:
            if PurePosixPath(text).is_relative_to(folder):
                return str(PurePosixPath(text).relative_to(folder))
        return PureWindowsPath(text).name if "\\" in text else PurePosixPath(text).name
    for folder in known:
        text = text.replace(folder, PurePosixPath(folder).name)
    return text


def _is_absolute(text: str) -> bool:
    return "\n" not in text and (PurePosixPath(text).is_absolute() or PureWindowsPath(text).is_absolute())


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, dict):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    return change(value) if isinstance(value, str) else value
