"""`etude check CONFIG` and `etude doctor`: would it run, what would it take, and what is missing here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from etude.cli import hints
from etude.cli.command import (
    RUNS,
    AsJson,
    ConfigFile,
    OnCluster,
    OutputDir,
    Overrides,
    on_cluster,
    option,
    run_async,
)
from etude.cli.console import emit, next_step, path_shown, say, say_wrapped

if TYPE_CHECKING:
    from etude.config.schema import Config
    from etude.preflight.estimate import Estimate
    from etude.preflight.finding import Findings

_MARKS = {"ok": "✓", "warning": "!", "error": "✗"}


def check(
    config: ConfigFile, override: Overrides = None, on: OnCluster = None, as_json: AsJson = False
) -> None:
    """Check a config, its agent, data and models, and estimate the run. Nothing is sampled."""
    from etude.config.load import load_config
    from etude.preflight.check import check_config

    override = [*(override or ()), *on_cluster(on)]
    settings = load_config(config, override)
    report = run_async(check_config(settings))
    estimate = report.estimate
    _show(report.findings, {"ready": report.is_ready, "estimate": estimate and asdict(estimate)}, as_json)
    if not as_json:
        if estimate is not None:
            _show_estimate(estimate)
        if report.is_ready:
            _show_next(report.trains, settings, config, override)
        else:
            say(f"\nmend what is marked {_MARKS['error']}, and check again")
    if not report.is_ready:
        raise typer.Exit(2)


def _show_next(trains: bool, settings: Config, config: Path, overrides: Sequence[str]) -> None:
    """Offer the next command; secrets that were typed are not repeated."""
    from etude.loop.lifecycle import names_secret

    secrets = [override for override in overrides if names_secret(settings, override)]
    if secrets:
        keys = (override.partition("=")[0] for override in secrets)
        say(f"\nadd again what is secret: {' '.join(f'-o {key}=…' for key in keys)}")
    rest = [override for override in overrides if override not in secrets]
    next_step((hints.train if trains else hints.evaluate)(config, rest))


def _show_estimate(estimate: Estimate) -> None:
    from etude.preflight.machine import shown_bytes

    for warning in estimate.warnings:
        say_wrapped(f"{_MARKS['warning']} {warning}")
    training, validation = estimate.training_episodes, estimate.validation_episodes
    say(f"\nepisodes        {training:,} to train on + {validation:,} to validate")
    say(f"calls           about {estimate.calls:,}")
    prompt, sampled = estimate.prompt_tokens, estimate.completion_tokens
    say(f"tokens          about {prompt:,} in prompts, {sampled:,} sampled")
    if estimate.seconds is not None:
        say(f"time            about {about(estimate.seconds)}")
    if estimate.training_usd is not None:
        say(f"price           at most about ${estimate.training_usd:,.2f} for training")
    if estimate.disk_bytes is not None:
        say(f"disk            about {shown_bytes(estimate.disk_bytes)} for the versions that are kept")
    for assumption in estimate.assumptions:
        say_wrapped(f"assuming        {assumption}")


def about(seconds: float) -> str:
    """A duration in one unit."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return "a second" if seconds < 1.5 else f"{seconds:.0f} seconds"


def doctor(
    output_dir: OutputDir = RUNS,
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
    """Look at Python, packages, devices and disk, and say what to install."""
    if drift is not None:
        _audit(drift, as_json)
        return
    from etude.preflight.doctor import examine

    findings = examine(output_dir)
    is_well = not findings.of("error")
    _show(findings, {"well": is_well}, as_json)
    if not is_well:
        if not as_json:
            say(f"\nmend what is marked {_MARKS['error']}")
        raise typer.Exit(1)
    if not as_json:
        next_step(hints.at_the_start())


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


def _show(findings: Findings, facts: dict[str, Any], as_json: bool) -> None:
    """Findings as lines; or with other facts as a JSON object."""
    if as_json:
        emit({**facts, "findings": asdict(findings)["items"]})
        return
    for finding in findings.items:
        say_wrapped(f"{_MARKS[finding.status]} {finding.what}: {finding.detail}")
