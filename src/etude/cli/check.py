"""`etude check CONFIG`: would it run, and what would it take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from etude.cli import hints
from etude.cli.command import AsJson, ConfigFile, Overrides, run_async
from etude.cli.console import emit, next_step, say, say_wrapped

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from etude.config.schema import Config
    from etude.preflight.check import CheckReport
    from etude.preflight.estimate import Estimate

MARKS = {"ok": "✓", "warning": "!", "error": "✗"}


def check(config: ConfigFile, override: Overrides = None, as_json: AsJson = False) -> None:
    """Check a config, its agent, data and models, and estimate the run. Nothing is sampled."""
    from etude.config.load import load_config
    from etude.preflight.check import check_config

    settings = load_config(config, override or ())
    report = run_async(check_config(settings))
    if as_json:
        estimate = None if report.estimate is None else report.estimate.as_json()
        emit({"ready": report.is_ready, "findings": report.findings.as_json(), "estimate": estimate})
    else:
        _show(report)
        _show_next(report, settings, config, override or ())
    if not report.is_ready:
        raise typer.Exit(2)


def _show_next(report: CheckReport, settings: Config, config: Path, overrides: Sequence[str]) -> None:
    """Offer the next command; secrets that were typed are not repeated."""
    from etude.loop.lifecycle import names_secret

    if not report.is_ready:
        say(f"\nmend what is marked {MARKS['error']}, and check again")
        return
    secrets = [override.partition("=")[0] for override in overrides if names_secret(settings, override)]
    if secrets:
        say(f"\nadd again what is secret: {' '.join(f'-o {key}=…' for key in secrets)}")
    rest = [override for override in overrides if override.partition("=")[0] not in secrets]
    next_step((hints.train if report.trains else hints.evaluate)(config, rest))


def _show(report: CheckReport) -> None:
    for finding in report.findings.items:
        say_wrapped(f"{MARKS[finding.status]} {finding.what}: {finding.detail}")
    if report.estimate is not None:
        _show_estimate(report.estimate)


def _show_estimate(estimate: Estimate) -> None:
    from etude.preflight.machine import shown_bytes

    for warning in estimate.warnings:
        say_wrapped(f"{MARKS['warning']} {warning}")
    say()
    say(
        f"episodes        {estimate.training_episodes:,} to train on"
        f" + {estimate.validation_episodes:,} to validate"
    )
    say(f"calls           about {estimate.calls:,}")
    say(
        f"tokens          about {estimate.prompt_tokens:,} in prompts, {estimate.completion_tokens:,} sampled"
    )
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
