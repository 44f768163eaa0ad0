"""`etude export RUN`: the trained model as a folder, or the trajectories as a file."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from etude.cli import hints
from etude.cli.console import emit, next_step, path_shown, say
from etude.cli.options import RUNS, AsJson, OutputDir, Run
from etude.cli.running import run as run_async

if TYPE_CHECKING:
    from etude.export.openai_rows import Written


class Format(StrEnum):
    """How trajectories are written."""

    ROWS = "rows"
    OPENAI = "openai"


class Method(StrEnum):
    """What trajectories are made for."""

    GRPO = "grpo"
    DPO = "dpo"
    SUPERVISED = "supervised"


def export(
    run: Run,
    version: Annotated[
        str,
        typer.Option(
            help="best, last, base, or a number such as v3; by default the best one where validations "
            "measured any, else the last."
        ),
    ] = "",
    lora: Annotated[
        bool, typer.Option("--lora/--merged", help="LoRA weights alone, or the whole model.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="The folder to write; by default in the run.")] = None,
    trajectories: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write trajectories: FILE.jsonl or FILE.parquet.")
    ] = None,
    format: Annotated[
        Format, typer.Option(help="Of trajectories: all fields, or OpenAI fine-tuning rows.")
    ] = Format.ROWS,
    method: Annotated[
        Method | None, typer.Option(help="Build trajectories for this method; by default the run's own.")
    ] = None,
    output_dir: OutputDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """Export the trained model with a model card, or the trajectories of a run."""
    from etude.core.errors import RequestError
    from etude.store.facts import find_run

    path = find_run(run, output_dir)
    if trajectories is not None:
        _export_trajectories(path, trajectories, format, method, as_json)
        return
    if format is not Format.ROWS or method is not None:
        raise RequestError("--format and --method go with --trajectories FILE")
    _export_model(path, version, out, lora, as_json)


def _export_model(run: Path, version: str, out: Path | None, lora: bool, as_json: bool) -> None:
    from etude.store.facts import histories_of
    from etude.store.summary import collapse_in
    from etude.store.versions import choose_version

    wanted = choose_version(run, version)
    from etude.export.model import export_model

    folder = (out or run / "export" / f"v{wanted.number}{'-lora' if lora else ''}").absolute()
    files = export_model(wanted, folder, lora_only=lora)
    warning = collapse_in(histories_of(run)[wanted.target])
    if as_json:
        emit(
            {
                "folder": str(folder),
                "version": wanted.number,
                "choice": wanted.choice or None,
                "lora_only": lora,
                "files": files,
                "warning": warning,
            }
        )
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

    suffix = file.suffix.lower()
    if suffix not in (".jsonl", ".parquet") or (format is Format.OPENAI and suffix != ".jsonl"):
        allowed = "FILE.jsonl" if format is Format.OPENAI else "FILE.jsonl or FILE.parquet"
        raise RequestError(f"--trajectories {file}: write {allowed}")
    written = run_async(_write(run, file, format, method))
    if as_json:
        emit({"file": str(file.absolute()), "rows": written.rows, "left_out": dict(written.left_out)})
        return
    say(f"wrote           {written.rows} rows to {path_shown(file)}")
    for reason, count in written.left_out.items():
        say(f"left out        {count} × {reason}")
    next_step(hints.show(run))


async def _write(run: Path, file: Path, format: Format, method: Method | None) -> Written:
    from etude.export.openai_rows import Written, require_openai_method, write_openai
    from etude.export.rows import write_jsonl, write_parquet
    from etude.export.trajectories import trajectories_of
    from etude.store.run_folder import RunFolder

    with RunFolder.read(run) as folder:
        phases = trajectories_of(folder, None if method is None else method.value)
        if format is Format.OPENAI:
            require_openai_method(folder.path, method)
            return await write_openai(file, folder, phases)
        write = write_parquet if file.suffix.lower() == ".parquet" else write_jsonl
        return Written(rows=await write(file, folder.name, phases))
