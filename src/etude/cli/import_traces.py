"""`etude import-traces LOG...`: store chats logged in production as episodes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from etude.cli import hints
from etude.cli.command import RUNS, AsJson, OutputDir, argument, option, run_async
from etude.cli.console import emit, next_step, say, shown_path, table


def import_traces(
    files: Annotated[list[Path], argument("The log: JSON Lines, JSON or Parquet; several files are one.")],
    hold_out: Annotated[
        float, option("Share of the prompts that are held out, to validate on.", min=0, max=0.9)
    ] = 0.2,
    name: Annotated[str | None, option("Name of the run; chosen by default.")] = None,
    output_dir: OutputDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """Store the chats of a log as episodes: to look at, to score, and to learn from.

    Reads rows in OpenAI's format: finished conversations, and requests with their responses.
    """
    from etude.store.facts import imported_lines
    from etude.store.run_folder import RunFolder
    from etude.wire.logged_chats import read_log, write_run

    episodes, imported = read_log(files, hold_out=hold_out)
    with RunFolder.create(output_dir, name) as run:
        run_async(write_run(run, episodes, imported))
    if as_json:
        emit({"run": str(run.path), **asdict(imported)})
        return
    if imported.left_out:
        rows = [(reason, of["count"], of["first"]) for reason, of in imported.left_out.items()]
        table(("left out", "count", "first at"), rows)
    for label, text in imported_lines(asdict(imported)):
        say(f"{label:<15} {text}")
    say(f"run             {shown_path(run.path)}")
    next_step(hints.command("episodes", run.path))
