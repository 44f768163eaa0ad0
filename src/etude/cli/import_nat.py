"""`etude import-nat CONFIG FOLDER`: a project from a config of the NeMo Agent Toolkit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etude.cli import hints
from etude.cli.console import emit, next_step, path_shown, say
from etude.cli.options import AsJson


def import_nat(
    config: Annotated[Path, typer.Argument(help="The toolkit's config file.", show_default=False)],
    folder: Annotated[Path, typer.Argument(help="The folder to make.", show_default=False)],
    workflow: Annotated[
        str | None,
        typer.Option(help="The agent as `module:function`, where it is written already."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="The model to train in this process: a folder, or a name on the hub."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Take over a config of NVIDIA's NeMo Agent Toolkit, and list what could not be."""
    from etude.config.load import missing_variables
    from etude.integrations.nat.import_config import import_nat, write_project

    if model is not None and Path(model).is_dir():
        model = str(Path(model).absolute())
    imported = import_nat(config, workflow=workflow, model=model)
    written = write_project(imported, config, folder)
    if as_json:
        emit(
            {
                "folder": str(folder.absolute()),
                "files": [path.name for path in written],
                "notes": [note.model_dump(mode="json") for note in imported.notes],
            }
        )
        return
    for path in written:
        say(f"wrote {path_shown(path)}")
    if imported.notes:
        say(f"\nto look at, by the lines of {path_shown(config)}:")
    for note in imported.notes:
        where = note.key if note.line is None else f"{note.line}: {note.key}"
        say(f"  {where}: {note.message}")
    missing = missing_variables(folder / "config.yml")
    if missing:
        say(f"\nput {', '.join(missing)} into the environment first: {hints.check_project(folder).command}")
    else:
        next_step(hints.check_project(folder))
