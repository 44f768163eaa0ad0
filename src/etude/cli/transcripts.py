"""`etude transcripts RUN`: conversations as files."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from etude.cli import hints
from etude.cli.command import RUNS, AsJson, OutputDir, Run, option, refuse
from etude.cli.console import emit, next_step, path_shown, say


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
