"""`etude init FOLDER` and `etude skill`: write a project to start from, and a guide for coding agents."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

from etude.cli import hints
from etude.cli.command import AsJson, argument, option
from etude.cli.console import emit, next_step, say, shown_path

Project = Literal["larger", "tickets", "sql", "game", "tool"]
"""The folders in `preflight/starter_files`."""


def init(
    folder: Annotated[Path, argument("The folder to make.")],
    task: Annotated[
        Project | None,
        option(
            "What the agent does: names the larger of two numbers (the default), reads tickets, writes SQL, "
            "plays a guessing game, uses a tool."
        ),
    ] = None,
    model: Annotated[
        str | None, option("The model to start from: a folder, or a name on the Hugging Face hub.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a small project that runs: an agent, examples, a config."""
    from etude.models.source import PACKAGED
    from etude.preflight.starter import write_starter

    chosen = PACKAGED if model is None else model
    if Path(chosen).is_dir():
        chosen = str(Path(chosen).absolute())
    written = write_starter(folder, task or "larger", chosen)
    if as_json:
        emit({"folder": str(folder.absolute()), "files": [path.name for path in written], "model": chosen})
        return
    for path in written:
        say(f"wrote {shown_path(path)}")
    if model is None:
        say(f"model {chosen}, from the Hugging Face hub; choose another with --model")
    next_step(f"cd {shlex.quote(shown_path(folder))} && {hints.command('check', 'config.yml')}")


def skill(
    to: Annotated[Path, option("The folder for SKILL.md.", show_default=True)] = Path(".claude/skills/etude"),
    as_json: AsJson = False,
) -> None:
    """Write a skill by which a coding agent sets up, trains and diagnoses runs."""
    from etude.store.files import write_new_files

    text = Path(__file__).with_name("skill.md").read_text(encoding="utf-8")
    (written,) = write_new_files(to, {"SKILL.md": text})
    if as_json:
        emit({"file": str(written.absolute())})
        return
    say(f"wrote {shown_path(written)}")
    next_step(hints.new_project())
