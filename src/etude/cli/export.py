"""`etude export RUN` and `etude transcripts RUN`: models, trajectories and conversations as files."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from etude.cli import hints
from etude.cli.command import RUNS, AsJson, OutputDir, Run, option, refuse, run_async
from etude.cli.console import emit, next_step, path_shown, say

if TYPE_CHECKING:
    from etude.export.rows import Written


Format = Literal["rows", "openai"]
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
    trajectories: Annotated[
        Path | None, option("Write trajectories: FILE.jsonl or FILE.parquet.", metavar="FILE")
    ] = None,
    format: Annotated[Format, option("Of trajectories: all fields, or OpenAI fine-tuning rows.")] = "rows",
    method: Annotated[
        Method | None, option("Build trajectories for this method; by default the run's own.")
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
    if format != "rows" or method is not None:
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
        facts = {"folder": str(folder), "version": wanted.number, "choice": wanted.choice or None}
        emit({**facts, "lora_only": lora, "files": files, "warning": warning})
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
    if suffix not in (".jsonl", ".parquet") or (format == "openai" and suffix != ".jsonl"):
        allowed = "FILE.jsonl" if format == "openai" else "FILE.jsonl or FILE.parquet"
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
    from etude.export.rows import require_openai_method, write_jsonl, write_parquet
    from etude.export.trajectories import trajectories_of
    from etude.store.run_folder import RunFolder

    with RunFolder.read(run) as folder:
        phases = trajectories_of(folder, method)
        if format == "openai":
            require_openai_method(folder.path, method)
        elif file.suffix.lower() == ".parquet":
            return await write_parquet(file, folder, phases)
        return await write_jsonl(file, folder, phases, openai=format == "openai")


def transcripts(
    run: Run,
    phase: Annotated[
        str | None, option("The episodes: eval, validation/5, train/1; by default the latest.")
    ] = None,
    out: Annotated[Path | None, option("The folder to write; by default in the run.")] = None,
    format: Annotated[Literal["yaml", "json"], option("Of the files.")] = "yaml",
    limit: Annotated[int | None, option("Write the first episodes only.", min=1)] = None,
    episode: Annotated[
        str | None, option("Print this episode, such as train/1/EXAMPLE/3, and write nothing.", metavar="ID")
    ] = None,
    raw: Annotated[bool, option("Show answers as the models wrote them.", "--raw")] = False,
    output_dir: OutputDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """Write what was said in the episodes of a run, a file for each; or print one of them."""
    from etude.export.transcripts import episode_transcript, write_transcripts
    from etude.store.facts import find_run
    from etude.store.run_folder import RunFolder

    path = find_run(run, output_dir)
    if episode is not None:
        refuse("--episode, which prints one episode", phase=phase, out=out, limit=limit)
        with RunFolder.read(path) as folder:
            shown = episode_transcript(folder, episode, format="json" if as_json else format, raw=raw)
        print(shown, end="")
        return
    with RunFolder.read(path) as folder:
        written = write_transcripts(folder, phase, folder=out, format=format, limit=limit, raw=raw)
    if as_json:
        emit(asdict(written))
        return
    say(f"wrote           {len(written.files)} transcripts of {written.phase}")
    if written.failed:
        say(f"failed          {written.failed} of these episodes")
    if written.cut_off:
        say(f"cut off         {written.cut_off} answers, at the limit of tokens (`truncated`)")
    say(f"to              {path_shown(written.folder)}")
    say(f"the first       {path_shown(written.folder / written.files[0])}")
    next_step(hints.show(path))
