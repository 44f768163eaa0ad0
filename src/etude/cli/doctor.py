"""`etude doctor [CONFIG]`: check that everything works here, and say how to mend what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etude.cli import hints
from etude.cli.command import RUNS, AsJson, Overrides, RunsFolder, argument, option, run_async
from etude.cli.console import STATUS_SIGNS, next_step, say, show_findings


def doctor(
    config: Annotated[
        Path | None, argument("A config, whose models, backends and storage are tried too, with their keys.")
    ] = None,
    override: Overrides = None,
    output_dir: RunsFolder = None,
    loop: Annotated[
        bool | None,
        option(
            "Train a tiny model, kill the run and have it go on, in about half a minute; by default where no "
            "config is named.",
            "--loop/--no-loop",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Examine the installation, the machine and a config's services, and try the whole loop."""
    from etude.config.load import load_config
    from etude.preflight.doctor import can_try_loop, examine, examine_services, try_loop
    from etude.preflight.finding import Findings

    settings = None if config is None else load_config(config, override or ())
    folder = output_dir or (RUNS if settings is None else settings.finetuning.output_dir)
    findings = examine(folder)
    if settings is not None:
        run_async(examine_services(settings, findings))
    shown = 0
    if (config is None if loop is None else loop) and can_try_loop(findings):
        if not as_json:
            show_findings(findings, {}, as_json)
            shown = len(findings.items)
            say("… a tiny model is trained, killed half-way and resumed")
        try_loop(findings)
    is_well = not findings.of("error")
    show_findings(Findings(findings.items[shown:]), {"well": is_well}, as_json)
    if not is_well:
        if not as_json:
            say(f"\nfix what is marked {STATUS_SIGNS['error']}")
        raise typer.Exit(1)
    if not as_json:
        next_step(hints.command_without_runs() if config is None else hints.command("check", config))
