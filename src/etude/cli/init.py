"""`etude init FOLDER`: a project to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etude.cli import hints
from etude.cli.console import emit, next_step, path_shown, say
from etude.cli.options import AsJson


def init(
    folder: Annotated[Path, typer.Argument(help="The folder to make.", show_default=False)],
    model: Annotated[
        str | None,
        typer.Option(help="The model to start from: a folder, or a name on the Hugging Face hub."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a small project that runs: an agent, examples, a config."""
    from etude.preflight.starter import MODEL, write_starter

    chosen = MODEL if model is None else model
    if Path(chosen).is_dir():
        chosen = str(Path(chosen).absolute())
    written = write_starter(folder, chosen)
    if as_json:
        emit({"folder": str(folder.absolute()), "files": [path.name for path in written], "model": chosen})
        return
    for path in written:
        say(f"wrote {path_shown(path)}")
    if model is None:
        say(f"model {chosen}: downloaded when it is first used, 270 MB; choose another with --model")
    next_step(hints.check_project(folder))
