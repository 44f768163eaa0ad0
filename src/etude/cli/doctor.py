"""`etude doctor`: what is installed, and what is missing."""

from __future__ import annotations

import typer

from etude.cli.check import MARKS
from etude.cli.console import emit, next_step, say
from etude.cli.options import RUNS, AsJson, OutputDir


def doctor(output_dir: OutputDir = RUNS, as_json: AsJson = False) -> None:
    """Look at Python, packages, devices and disk, and say what to install."""
    from etude.preflight.doctor import examine

    findings = examine(output_dir)
    is_well = not findings.of("error")
    if as_json:
        emit({"well": is_well, "findings": findings.as_json()})
    else:
        for finding in findings.found:
            say(f"{MARKS[finding.status]} {finding.what}: {finding.detail}")
        next_step("etude demo" if is_well else f"mend what is marked {MARKS['error']}")
    if not is_well:
        raise typer.Exit(1)
