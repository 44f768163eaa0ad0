"""`etude doctor`: what is installed, and what is missing; and what a model's chat template can do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from etude.cli import hints
from etude.cli.check import MARKS
from etude.cli.command import RUNS, AsJson, OutputDir
from etude.cli.console import emit, next_step, path_shown, say, say_wrapped

if TYPE_CHECKING:
    from etude.preflight.finding import Findings

Drift = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Look at the chat template of a model instead: over which conversations it extends what was "
        "sampled. A folder, or a name on the Hugging Face hub.",
        show_default=False,
    ),
]


def doctor(output_dir: OutputDir = RUNS, drift: Drift = None, as_json: AsJson = False) -> None:
    """Look at Python, packages, devices and disk, and say what to install."""
    if drift is not None:
        _audit(drift, as_json)
        return
    from etude.preflight.doctor import examine

    findings = examine(output_dir)
    is_well = not findings.of("error")
    _show(findings, {"well": is_well}, as_json)
    if not as_json:
        if is_well:
            next_step(hints.at_the_start())
        else:
            say(f"\nmend what is marked {MARKS['error']}")
    if not is_well:
        raise typer.Exit(1)


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
    _show(findings, {"model": model, "extends": not drifting}, as_json)
    if as_json:
        return
    if drifting:
        say("A new branch is trained on as a sequence of its own, and what came before it is computed again.")
    next_step(hints.new_project(path_shown(Path(model)) if Path(model).is_dir() else model))


def _show(findings: Findings, facts: dict[str, object], as_json: bool) -> None:
    if as_json:
        emit({**facts, "findings": findings.as_json()})
        return
    for finding in findings.items:
        say_wrapped(f"{MARKS[finding.status]} {finding.what}: {finding.detail}")
