"""`etude export RUN`: write a model as a folder, as a GGUF file or to the hub, or a run's trajectories."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from etude.cli import hints
from etude.cli.command import RUNS, AsJson, OutputDir, Run, option, read_env_key, refuse, run_async
from etude.cli.console import emit, next_step, say, shown_path, warn
from etude.core.errors import RequestError

if TYPE_CHECKING:
    from etude.show.exported_episodes import WriteCounts
    from etude.show.exported_model import Conversion
    from etude.show.hub import Repository

Format = Literal["safetensors", "gguf", "rows", "openai"]
Method = Literal["grpo", "dpo", "supervised"]
OutType = Literal["auto", "f32", "f16", "bf16", "q8_0"]

Version: TypeAlias = Annotated[
    str,
    option(
        "best, last, base, or a number such as v3; by default the best one where validations "
        "measured any, else the last."
    ),
]
FormatOf: TypeAlias = Annotated[
    Format | None,
    option(
        "Of a model: safetensors, or gguf for llama.cpp and Ollama. Of trajectories: rows with all "
        "fields, or OpenAI fine-tuning rows."
    ),
]
LlamaCpp: TypeAlias = Annotated[
    Path | None,
    option("The folder of llama.cpp, whose converter writes GGUF; by default LLAMA_CPP, or installed."),
]

OutTypeOf: TypeAlias = Annotated[
    OutType | None, option("How a GGUF file has its weights; by default 16 bits, as the model.")
]
PushTo: TypeAlias = Annotated[
    str | None, option("Send it to this repository of the Hugging Face hub.", metavar="USER/NAME")
]
TrajectoryFile: TypeAlias = Annotated[Path | None, option("Write trajectories: FILE.jsonl.", metavar="FILE")]
MethodOf: TypeAlias = Annotated[
    Method | None, option("Build trajectories for this method; by default the run's own.")
]
Server: TypeAlias = Annotated[
    str | None, option("Of the server at this address; then RUN is the name of its model.", metavar="ADDRESS")
]
ApiKeyEnv: TypeAlias = Annotated[
    str | None, option("Environment variable with the key of that server.", metavar="NAME")
]


def export(
    run: Run,
    version: Version = "",
    lora: Annotated[bool, option("LoRA weights alone, or the whole model.", "--lora/--merged")] = False,
    out: Annotated[Path | None, option("The folder to write; by default in the run.")] = None,
    format: FormatOf = None,
    outtype: OutTypeOf = None,
    llama_cpp: LlamaCpp = None,
    push: PushTo = None,
    public: Annotated[bool, option("Whether anyone may see it there.", "--public/--private")] = False,
    license: Annotated[str | None, option("For the model card: apache-2.0.", metavar="ID")] = None,
    trajectories: TrajectoryFile = None,
    method: MethodOf = None,
    server: Server = None,
    api_key_env: ApiKeyEnv = None,
    output_dir: OutputDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """Export the trained model with a model card, here or to the hub, or the trajectories of a run."""
    from etude.store.facts import find_run

    if format == "gguf":
        refuse("--format gguf, which is of the whole model", lora=lora)
    else:
        refuse("safetensors: add --format gguf", outtype=outtype, llama_cpp=llama_cpp)
    wish = _Options(lora, out, format == "gguf", outtype or "auto", llama_cpp, license)
    if server is not None:
        refuse("--server", version=version or None, push=push, public=public, license=license)
        refuse("--server", trajectories=trajectories, method=method)
        if format in ("rows", "openai"):
            raise RequestError(f"--format {format} has no meaning with --server")
        _export_served(server, run, wish, api_key_env, as_json)
        return
    refuse("a run: it goes with --server ADDRESS", api_key_env=api_key_env)
    if run.startswith("ft:"):
        raise RequestError(f"{run} is not a run but a server's model: etude export --server ADDRESS {run}")
    path = find_run(run, output_dir)
    if trajectories is not None:
        if format in ("safetensors", "gguf"):
            raise RequestError(f"--format {format} is of a model, and --trajectories has rows or openai")
        refuse("--trajectories", version=version or None, license=license, out=out)
        refuse("--trajectories", push=push, public=public, lora=lora, outtype=outtype, llama_cpp=llama_cpp)
        _export_trajectories(path, trajectories, format or "rows", method, as_json)
        return
    if format in ("rows", "openai") or method is not None:
        raise RequestError(f"--{'method' if method else 'format'} goes with --trajectories FILE")
    if push is None:
        refuse("a folder of this machine: add --push USER/NAME", public=public)
    repository = None
    if push is not None:
        from etude.show.hub import Repository

        repository = Repository(push, public)
        repository.require()  # Check before the work begins.
    _export(path, version, wish, repository, as_json)


@dataclass(frozen=True, slots=True)
class _Options:
    """The wanted form of an exported model."""

    lora: bool
    out: Path | None
    gguf: bool
    outtype: OutType
    llama_cpp: Path | None
    license: str | None

    @property
    def suffix(self) -> str:
        return "-gguf" if self.gguf else "-lora" if self.lora else ""

    @property
    def conversion(self) -> Conversion | None:
        """The conversion to a GGUF file, if one is wanted. Raises RequestError without llama.cpp."""
        from etude.show.exported_model import Conversion, find_converter

        return Conversion(find_converter(self.llama_cpp), self.outtype) if self.gguf else None


def _export(run: Path, version: str, wish: _Options, repository: Repository | None, as_json: bool) -> None:
    from etude.lost_versions import version_on_disk
    from etude.show.exported_model import export_model
    from etude.store.facts import read_histories
    from etude.store.figures import collapse_in
    from etude.store.stored_config import needs_program

    with version_on_disk(run, version, warn) as wanted:
        folder = (wish.out or run / "export" / f"v{wanted.number}{wish.suffix}").absolute()
        files = export_model(wanted, folder, lora_only=wish.lora, gguf=wish.conversion, license=wish.license)
    warning = collapse_in(read_histories(run)[wanted.target])
    facts: dict[str, Any] = {"folder": str(folder), "version": wanted.number, "choice": wanted.choice or None}
    facts |= {"lora_only": wish.lora, "files": files, "warning": warning}
    if not as_json:
        say(f"exported        {wanted}" + (f"  ({wanted.choice})" if wanted.choice else ""))
        if warning is not None:
            say(f"warning         {warning}")
        say(f"to              {shown_path(folder)}")
        say(f"files           {', '.join(files)}")
    if repository is not None:
        address = repository.send(folder, str(wanted))
        facts["hub"] = {"address": address, "visibility": repository.visibility}
        if not as_json:
            say(f"sent            to {address} ({repository.visibility})")
    if as_json:
        emit(facts)
    elif not wish.suffix and wanted.target is None:
        again = hints.command("evaluate", run / "config.yml", "--model", folder)
        next_step(hints.new_project(shown_path(folder)) if needs_program(run) else again)
    elif wanted.run == run:
        # The exported folder is no model that the config could use instead of its own.
        next_step(hints.evaluate_version(run, str(wanted).removeprefix(f"{run.name}:")))


def _export_served(server: str, model: str, wish: _Options, api_key_env: str | None, as_json: bool) -> None:
    from etude.show.exported_model import plain_name
    from etude.show.hub import export_served

    folder = (wish.out or Path(f"{plain_name(model)}{wish.suffix}")).absolute()
    files = export_served(
        server, model, folder, key=read_env_key(api_key_env), lora_only=wish.lora, gguf=wish.conversion
    )
    if as_json:
        emit({"folder": str(folder), "model": model, "lora_only": wish.lora, "files": files})
        return
    say(f"exported        {model}")
    say(f"to              {shown_path(folder)}")
    say(f"files           {', '.join(files)}")
    if not wish.suffix:
        next_step(hints.new_project(shown_path(folder)))


def _export_trajectories(run: Path, file: Path, format: Format, method: Method | None, as_json: bool) -> None:
    if file.suffix.lower() != ".jsonl":
        raise RequestError(f"--trajectories {file}: write FILE.jsonl")
    written = run_async(_write(run, file, format, method))
    if as_json:
        emit({"file": str(file.absolute()), "rows": written.rows, "left_out": dict(written.left_out)})
        return
    say(f"wrote           {written.rows} rows to {shown_path(file)}")
    for reason, count in written.left_out.items():
        say(f"left out        {count} × {reason}")
    next_step(hints.show(run))


async def _write(run: Path, file: Path, format: Format, method: Method | None) -> WriteCounts:
    from etude.show.exported_episodes import read_trajectories, require_openai_method, write_jsonl
    from etude.store.run_folder import RunFolder

    with RunFolder.read(run) as folder:
        phases = read_trajectories(folder, method)
        if format == "openai":
            require_openai_method(folder.path, method)
        return await write_jsonl(file, folder, phases, openai=format == "openai")
