"""The card of an exported model: README.md with the front matter that model hubs read.

It is made of the facts of its run. It is meant for others: it names no folder of this machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal, TypeAlias

from etude.config.document import dig, dump, strings
from etude.core.history import Entry, History
from etude.report.figure_lines import evaluators_in, shown_bounds, shown_score
from etude.store.facts import facts_of, histories_of
from etude.store.figures import figure_of, version_of, with_rewards
from etude.store.stored_config import CONFIG, stored_data, trained_parts
from etude.store.summary import collapse_in
from etude.store.versions import RunVersion

_PACKAGES = ("etude", "torch", "transformers", "peft", "accelerate", "safetensors", "tokenizers")
_CONFIG_FILE = ("finetuning", "run_configuration", "config_file")


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
{fetch}$ ollama create {name} -f Modelfile
$ ollama run {name}
```

llama.cpp takes the file as it is: `llama-cli -m FILE.gguf`.
"""
_KINDS: dict[Kind, str] = {"merged": "Weights", "lora": "LoRA weights", "gguf": "A GGUF file"}
_LIBRARIES: dict[Kind, str] = {"merged": "transformers", "lora": "peft"}


@dataclass(frozen=True, slots=True)
class CardFacts:
    """Facts for a card that are not those of the run."""

    kind: Kind = "merged"
    repository: str | None = None
    """Of the hub, where the model goes; else it is used as a folder."""
    license: str | None = None
    """As the hub writes it: `apache-2.0`. None where nobody said."""


def model_card(wanted: RunVersion, facts: CardFacts) -> str:
    """Markdown with the front matter that model hubs read, and the config as the run folder keeps it."""
    lines = [*_front_matter(wanted, facts), *_introduction(wanted, facts)]
    lines += _results(histories_of(wanted.run)[wanted.target], wanted)
    if facts.kind == "gguf":
        lines.append("All of this was measured before the weights were converted to GGUF.\n")
    return "\n".join([*lines, usage(model_name(wanted), facts), *_making(wanted)])


def usage(name: str, facts: CardFacts) -> str:
    """The section on how a model of that name is used."""
    if facts.kind == "gguf":
        fetch = f"$ hf download {facts.repository} --local-dir .\n" if facts.repository else ""
        return _USE_GGUF.format(fetch=fetch, name=name.lower())
    place = f'"{facts.repository}"' if facts.repository else "FOLDER"
    load = _LOAD_LORA if facts.kind == "lora" else _LOAD
    return _USE.format(load=load.format(place=place), place=place)


def model_name(wanted: RunVersion) -> str:
    """A name for the version that programs and hubs take: `sums-v3`, `debate-prover-v3`."""
    return plain_name("-".join(filter(None, (wanted.run.name, wanted.target, f"v{wanted.number}"))))


def plain_name(name: str) -> str:
    """The name as programs and hubs take it, and as a folder may be called."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.")


def _front_matter(wanted: RunVersion, facts: CardFacts) -> Iterator[str]:
    data = stored_data(wanted.run)
    parts = trained_parts(data, wanted.target)
    front: dict[str, Any] = {}
    if facts.license is not None:
        front["license"] = facts.license
    if facts.kind in _LIBRARIES:
        front["library_name"] = _LIBRARIES[facts.kind]
    front["pipeline_tag"] = "text-generation"
    # A folder of this machine means nothing to anybody else.
    if _is_on_hub(parts["base"]):
        front["base_model"] = parts["base"]
    dataset = dig(data, ("eval", "general", "dataset"))
    if isinstance(dataset, dict) and dataset.get("_type") == "huggingface" and _is_on_hub(dataset["path"]):
        front["datasets"] = [dataset["path"]]
    front["tags"] = ["etude", *filter(None, (parts["method"],)), *(["gguf"] if facts.kind == "gguf" else [])]
    yield f"---\n{dump(front).strip()}\n---\n"


def _is_on_hub(name: str | None) -> bool:
    """Whether this may be the name of a model or dataset: it is no folder, and no model made on the spot."""
    return name not in (None, "tiny") and re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", str(name)) is not None


def _introduction(wanted: RunVersion, card: CardFacts) -> Iterator[str]:
    facts, parts = facts_of(wanted.run), trained_parts(stored_data(wanted.run), wanted.target)
    base = parts["base"]
    version = f"version {wanted.number}" if wanted.number else "the base model"
    target = "" if wanted.target is None else f", {wanted.target}"
    yield f"# {facts.name}{target}, {version}\n"
    yield f"{_KINDS[card.kind]} of an agent's model, trained with Etude from the agent's own runs.\n"
    rows = {
        "base model": Path(base).name if base and Path(base).is_absolute() else base,
        "trajectory builder": parts["method"],
        "episodes trained from": _episodes(histories_of(wanted.run)[wanted.target], wanted.number),
        "trained by": parts["backend"],
        "epochs of the run": f"{facts.epochs_done} of {facts.num_epochs}",
        "version": str(wanted.number),
        "digest of the trained weights": wanted.version.digest if wanted.version else None,
    }
    yield from _table(("", ""), [(key, value) for key, value in rows.items() if value is not None])
    if card.license is None:
        yield "No license was stated with this export; the base model's may hold for it.\n"


def _episodes(history: History, number: int) -> int:
    """How many episodes were collected for the epochs that made a version."""
    made = [entry for entry in history.trained if entry.version and entry.version.number <= number]
    return sum(int(entry.metrics.get("episodes") or 0) for entry in made)


def _results(history: History, wanted: RunVersion) -> Iterator[str]:
    yield "## Results\n"
    entries: list[Entry] = [*history.measured] or [*history.epochs]
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
