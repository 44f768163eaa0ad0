"""`etude doctor [CONFIG]`: does everything work here, and how to mend what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etude.cli import hints
from etude.cli.command import RUNS, AsJson, Overrides, argument, option, run_async
from etude.cli.console import MARKS, next_step, path_shown, say, show_findings


def doctor(
    config: Annotated[
        Path | None, argument("A config, whose models, backends and storage are tried too, with their keys.")
    ] = None,
    override: Overrides = None,
    output_dir: Annotated[
        Path | None, option(f"Where runs are kept; by default the config's folder for them, or {RUNS}.")
    ] = None,
    loop: Annotated[
        bool | None,
        option(
            "Train a tiny model, kill the run and have it go on, in about half a minute; by default where no "
            "config is named.",
            "--loop/--no-loop",
        ),
    ] = None,
    drift: Annotated[
        str | None,
        option(
            "Look at the chat template of a model instead: over which conversations it extends what "
            "was sampled. A folder, or a name on the Hugging Face hub.",
            metavar="MODEL",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Look at the installation, the machine, and a config's services, and try the whole loop."""
    if drift is not None:
        _audit(drift, as_json)
        return
    from etude.config.load import load_config
    from etude.preflight.doctor import can_try_loop, examine
    from etude.preflight.finding import Findings
    from etude.preflight.services import examine_services
    from etude.preflight.trial import try_loop

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
            say("… a tiny model is trained, killed half-way and gone on with")
        try_loop(findings)
    is_well = not findings.of("error")
    show_findings(Findings(findings.items[shown:]), {"well": is_well}, as_json)
    if not is_well:
        if not as_json:
            say(f"\nmend what is marked {MARKS['error']}")
        raise typer.Exit(1)
    if not as_json:
        next_step(hints.at_the_start() if config is None else hints.command("check", config))


def _audit(model: str, as_json: bool) -> None:
    """Drift costs time and is no error: a conversation that drifts is trained on in several branches."""
    from etude.inference.local import require_local_extra

    require_local_extra()
    from etude.models.source import locate

    locate(model)
    from etude.models.speech import Speech
    from etude.preflight.drift import audit

    findings = audit(Speech.load(model).template)
    drifting = findings.of("warning")
    show_findings(findings, {"model": model, "extends": not drifting}, as_json)
    if as_json:
        return
    if drifting:
        say("A new branch is trained on as a sequence of its own, and what came before it is computed again.")
    next_step(hints.new_project(path_shown(Path(model)) if Path(model).is_dir() else model))
