"""`etude export RUN`: write a model as a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from etude.cli import hints
from etude.cli.command import RUNS, AsJson, OutputDir, Run, option
from etude.cli.console import emit, next_step, say, shown_path, warn


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
    output_dir: OutputDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """Export the trained model with a model card."""
    from etude.lost_versions import version_on_disk
    from etude.show.exported_model import export_model
    from etude.store.facts import find_run
    from etude.store.stored_config import needs_program

    path = find_run(run, output_dir)
    with version_on_disk(path, version, warn) as wanted:
        folder = (out or path / "export" / f"v{wanted.number}{'-lora' if lora else ''}").absolute()
        files = export_model(wanted, folder, lora_only=lora)
    if as_json:
        facts = {"folder": str(folder), "version": wanted.number, "choice": wanted.choice or None}
        emit({**facts, "lora_only": lora, "files": files})
        return
    say(f"exported        {wanted}" + (f"  ({wanted.choice})" if wanted.choice else ""))
    say(f"to              {shown_path(folder)}")
    say(f"files           {', '.join(files)}")
    if not lora and wanted.target is None:
        again = hints.command("evaluate", path / "config.yml", "--model", folder)
        next_step(hints.new_project(shown_path(folder)) if needs_program(path) else again)
    elif wanted.run == path:
        # The exported folder is not a model that the config could use instead of its own.
        next_step(hints.evaluate_version(path, str(wanted).removeprefix(f"{path.name}:")))
