"""`etude transcripts RUN`: what was said in the episodes of a run, to be read."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from etude.cli import hints
from etude.cli.console import emit, next_step, path_shown, say
from etude.cli.options import RUNS, AsJson, OutputDir, Run


class Format(StrEnum):
    """How transcripts are written."""

    YAML = "yaml"
    JSON = "json"


def _printed(format: Format, as_json: bool) -> Literal["yaml", "json"]:
    return "json" if as_json else format.value


def _refuse_with_episode(**given: object) -> None:
    from etude.core.errors import RequestError

    for name, value in given.items():
        if value is not None:
            raise RequestError(f"--{name} has no meaning with --episode, which prints one episode")


def transcripts(
    run: Run,
    phase: Annotated[
        str | None, typer.Option(help="The episodes: eval, validation/5, train/1; by default the latest.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder to write; by default in the run.")] = None,
    format: Annotated[Format, typer.Option(help="Of the files.")] = Format.YAML,
    limit: Annotated[int | None, typer.Option(min=1, help="Write the first episodes only.")] = None,
    episode: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Print this episode, such as train/1/EXAMPLE/3, and write nothing."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Show answers as the models wrote them.")] = False,
    output_dir: OutputDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """Write what was said in the episodes of a run, a file for each; or print one of them."""
    from etude.export.transcripts import episode_transcript, write_transcripts
    from etude.store.facts import find_run
    from etude.store.run_folder import RunFolder

    path = find_run(run, output_dir)
    if episode is not None:
        _refuse_with_episode(phase=phase, out=out, limit=limit)
        with RunFolder.read(path) as folder:
            print(episode_transcript(folder, episode, format=_printed(format, as_json), raw=raw), end="")
        return
    with RunFolder.read(path) as folder:
        written = write_transcripts(folder, phase, folder=out, format=format.value, limit=limit, raw=raw)
    if as_json:
        emit(
            {
                "folder": str(written.folder),
                "phase": written.phase,
                "files": written.files,
                "failed": written.failed,
            }
        )
        return
    say(f"wrote           {len(written.files)} transcripts of {written.phase}")
    if written.failed:
        say(f"failed          {written.failed} of these episodes")
    say(f"to              {path_shown(written.folder)}")
    say(f"the first       {path_shown(written.folder / written.files[0])}")
    next_step(hints.show(path))
