"""`etude export RUN`: a model as a folder, or the trajectories of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from etude.cli import hints
from etude.cli.command import RUNS, AsJson, OutputDir, Run, option, refuse, run_async
from etude.cli.console import emit, next_step, path_shown, say

if TYPE_CHECKING:
    from etude.export.rows import Written


Format = Literal["rows", "openai"]
Method = Literal["grpo", "dpo", "supervised"]

Version: TypeAlias = Annotated[
    str,
    option(
        "best, last, base, or a number such as v3; by default the best one where validations "
        "measured any, else the last."
    ),
]
FormatOf: TypeAlias = Annotated[
    Format | None, option("Of trajectories: rows with all fields, or OpenAI fine-tuning rows.")
]
TrajectoryFile: TypeAlias = Annotated[Path | None, option("Write trajectories: FILE.jsonl.", metavar="FILE")]
MethodOf: TypeAlias = Annotated[
    Method | None, option("Build trajectories for this method; by default the run's own.")
]


def export(
    run: Run,
    version: Version = "",
    lora: Annotated[bool, option("LoRA weights alone, or the whole model.", "--lora/--merged")] = False,
    out: Annotated[Path | None, option("The folder to write; by default in the run.")] = None,
    format: FormatOf = None,
    license: Annotated[str | None, option("For the model card: apache-2.0.", metavar="ID")] = None,
    trajectories: TrajectoryFile = None,
    method: MethodOf = None,
    output_dir: OutputDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """Export the trained model with a model card, or the trajectories of a run."""
    from etude.core.errors import RequestError
    from etude.store.facts import find_run
    from etude.store.files import TO_FETCH

    if run.startswith("ft:"):
        raise RequestError(f"{run} is no run, but a server's model: {TO_FETCH}")
    path = find_run(run, output_dir)
    if trajectories is not None:
        refuse("--trajectories", lora=lora)
        _export_trajectories(path, trajectories, format or "rows", method, as_json)
        return
    refuse("a model: add --trajectories FILE", format=format, method=method)
    _export_model(path, version, lora, out, license, as_json)


def _export_model(
    run: Path, version: str, lora: bool, out: Path | None, license: str | None, as_json: bool
) -> None:
    from etude.export.model import export_model
    from etude.store.facts import histories_of
    from etude.store.figures import collapse_in
    from etude.store.versions import choose_version

    wanted = choose_version(run, version)
    folder = (out or run / "export" / f"v{wanted.number}{'-lora' if lora else ''}").absolute()
    files = export_model(wanted, folder, lora_only=lora, license=license)
    warning = collapse_in(histories_of(run)[wanted.target])
    if as_json:
        facts = {"folder": str(folder), "version": wanted.number, "choice": wanted.choice or None}
        emit(facts | {"lora_only": lora, "files": files, "warning": warning})
        return
    say(f"exported        {wanted}" + (f"  ({wanted.choice})" if wanted.choice else ""))
    if warning is not None:
        say(f"warning         {warning}")
    say(f"to              {path_shown(folder)}")
    say(f"files           {', '.join(files)}")
    if lora or wanted.target is not None:
        # What stands alone there is no model that the config could name in place of its own.
        next_step(hints.evaluate_version(run, str(wanted).removeprefix(f"{run.name}:")))
    else:
        next_step(hints.evaluate_exported(run, folder))


def _export_trajectories(run: Path, file: Path, format: Format, method: Method | None, as_json: bool) -> None:
    from etude.core.errors import RequestError

    if file.suffix.lower() != ".jsonl":
        raise RequestError(f"--trajectories {file}: write FILE.jsonl")
    written = run_async(_write(run, file, format, method))
    if as_json:
        emit({"file": str(file.absolute()), "rows": written.rows, "left_out": dict(written.left_out)})
        return
    say(f"wrote           {written.rows} rows to {path_shown(file)}")
    for reason, count in written.left_out.items():
        say(f"left out        {count} × {reason}")
    next_step(hints.show(run))


async def _write(run: Path, file: Path, format: Format, method: Method | None) -> Written:
    from etude.export.rows import require_openai_method, trajectories_of, write_jsonl
    from etude.store.run_folder import RunFolder

    with RunFolder.read(run) as folder:
        phases = trajectories_of(folder, method)
        if format == "openai":
            require_openai_method(folder.path, method)
        return await write_jsonl(file, folder, phases, openai=format == "openai")
