"""`etude doctor [CONFIG]`: check that everything works here, and say how to mend what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etude.cli import hints
from etude.cli.command import RUNS, AsJson, Overrides, RunsFolder, argument, run_async
from etude.cli.console import STATUS_SIGNS, next_step, say, show_findings


def doctor(
    config: Annotated[
        Path | None, argument("A config, whose models, backends and storage are tried too, with their keys.")
    ] = None,
    override: Overrides = None,
    output_dir: RunsFolder = None,
    as_json: AsJson = False,
) -> None:
    """Examine the installation, the machine and a config's services."""
    from etude.config.load import load_config
    from etude.preflight.doctor import examine, examine_services

    settings = None if config is None else load_config(config, override or ())
    findings = examine(output_dir or (RUNS if settings is None else settings.finetuning.output_dir))
    if settings is not None:
        run_async(examine_services(settings, findings))
    is_well = not findings.with_status("error")
    show_findings(findings, {"well": is_well}, as_json)
    if not is_well:
        if not as_json:
            say(f"\nfix what is marked {STATUS_SIGNS['error']}")
        raise typer.Exit(1)
    if not as_json:
        next_step(hints.command_without_runs() if config is None else hints.command("check", config))
