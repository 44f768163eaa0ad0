"""`etude export RUN`: write a model as a folder, or a run's trajectories."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from etude.cli import hints
from etude.cli.command import RUNS, AsJson, OutputDir, Run, option, refuse, run_async
from etude.cli.console import emit, next_step, say, shown_path, warn
from etude.core.errors import RequestError

Method = Literal["grpo", "dpo", "supervised"]


def export(
    run: Run,
    version: Annotated[
        str,
        option(
            "best, last, base, or a number such as v3; by default the best one where validations "
            "measured any, else the last."
        ),
    ] = "",
    lora: Annotated[bool, option("LoRA weights alone, or the whole model.", "--lora/--merged")] = False,
    out: Annotated[Path | None, option("The folder to write; by default in the run.")] = None,
    license: Annotated[str | None, option("For the model card: apache-2.0.", metavar="ID")] = None,
    trajectories: Annotated[Path | None, option("Write trajectories: FILE.jsonl.", metavar="FILE")] = None,
    method: Annotated[
        Method | None, option("Build trajectories for this method; by default the run's own.")
    ] = None,
    output_dir: OutputDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """Export the trained model with a model card, or the trajectories of a run."""
    from etude.store.facts import find_run

    path = find_run(run, output_dir)
    if trajectories is not None:
        refuse("--trajectories", version=version or None, license=license, out=out, lora=lora)
        _export_trajectories(path, trajectories, method, as_json)
        return
    if method is not None:
        raise RequestError("--method goes with --trajectories FILE")
    _export_model(path, version, out, lora, license, as_json)


def _export_model(
    run: Path, version: str, out: Path | None, lora: bool, license: str | None, as_json: bool
) -> None:
    from etude.lost_versions import version_on_disk
    from etude.show.exported_model import export_model
    from etude.store.facts import read_histories
    from etude.store.figures import collapse_in
    from etude.store.stored_config import needs_program

    with version_on_disk(run, version, warn) as wanted:
        folder = out or run / "export" / f"v{wanted.number}{'-lora' if lora else ''}"
        folder = folder.absolute()
        files = export_model(wanted, folder, lora_only=lora, license=license)
    warning = collapse_in(read_histories(run)[wanted.target])
    facts: dict[str, Any] = {"folder": str(folder), "version": wanted.number, "choice": wanted.choice or None}
    if as_json:
        emit({**facts, "lora_only": lora, "files": files, "warning": warning})
        return
    say(f"exported        {wanted}" + (f"  ({wanted.choice})" if wanted.choice else ""))
    if warning is not None:
        say(f"warning         {warning}")
    say(f"to              {shown_path(folder)}")
    say(f"files           {', '.join(files)}")
    if not lora and wanted.target is None:
        again = hints.command("evaluate", run / "config.yml", "--model", folder)
        next_step(hints.new_project(shown_path(folder)) if needs_program(run) else again)
    elif wanted.run == run:
        # The exported folder is no model that the config could use instead of its own.
        next_step(hints.evaluate_version(run, str(wanted).removeprefix(f"{run.name}:")))


def _export_trajectories(run: Path, file: Path, method: Method | None, as_json: bool) -> None:
    from etude.show.exported_episodes import read_trajectories, write_jsonl
    from etude.store.run_folder import RunFolder

    if file.suffix.lower() != ".jsonl":
        raise RequestError(f"--trajectories {file}: write FILE.jsonl")
    with RunFolder.read(run) as folder:
        rows = run_async(write_jsonl(file, folder, read_trajectories(folder, method)))
    if as_json:
        emit({"file": str(file.absolute()), "rows": rows})
        return
    say(f"wrote           {rows} rows to {shown_path(file)}")
    next_step(hints.show(run))
