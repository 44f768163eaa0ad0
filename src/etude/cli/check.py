"""`etude check CONFIG`: would it run, and what would it take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from etude.cli import hints
from etude.cli.command import (
    AsJson,
    ConfigFile,
    OnCluster,
    Overrides,
    on_cluster,
    option,
    run_async,
)
from etude.cli.console import MARKS, next_step, say, say_wrapped, show_findings

if TYPE_CHECKING:
    from etude.config.schema import Config
    from etude.preflight.estimate import Estimate, Range


def check(
    config: ConfigFile,
    override: Overrides = None,
    on: OnCluster = None,
    play: Annotated[int, option("Play so many episodes of training, to measure what they take.", min=0)] = 0,
    as_json: AsJson = False,
) -> None:
    """Check a config, its agent, data and models, and estimate the run.

    Without --play nothing is sampled.
    """
    from etude.config.load import load_config
    from etude.preflight.check import check_config

    override = [*(override or ()), *on_cluster(on)]
    settings = load_config(config, override)
    report = run_async(check_config(settings, play=play))
    estimate = report.estimate
    show_findings(
        report.findings, {"ready": report.is_ready, "estimate": estimate and asdict(estimate)}, as_json
    )
    if not as_json:
        if estimate is not None:
            _show_estimate(estimate)
        if report.is_ready:
            _show_next(report.trains, settings, config, override)
        else:
            say(f"\nmend what is marked {MARKS['error']}, and check again")
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
    next_step(hints.with_overrides("train" if trains else "evaluate", config, rest))


def _show_estimate(estimate: Estimate) -> None:
    for warning in estimate.warnings:
        say_wrapped(f"{MARKS['warning']} {warning}")
    training, validation = estimate.training_episodes, estimate.validation_episodes
    say(f"\nepisodes        {training:,} to train on + {validation:,} to validate")
    say(f"calls           about {estimate.calls:,}")
    prompt, sampled = estimate.prompt_tokens, estimate.completion_tokens
    apart = _interval(estimate.tokens, "{:,.0f}")
    say(f"tokens          about {prompt:,} in prompts, {sampled:,} sampled{apart}")
    if estimate.usd is not None:
        say_wrapped(f"price           about {_money(estimate)} for calls")
    if estimate.training_usd is not None:
        say(f"price           at most about ${estimate.training_usd:,.2f} for training")
    for assumption in estimate.assumptions:
        say_wrapped(f"assuming        {assumption}")


def _money(estimate: Estimate) -> str:
    """The price of all calls with its interval, and of each model's where there are several."""
    from etude.budget.ledger import shown_usd

    assert estimate.usd is not None
    by_model = [f"{name} {shown_usd(usd)}" for name, usd in estimate.usd_by_model.items()]
    each = f", {', '.join(by_model)}" if len(by_model) > 1 else ""
    return f"{shown_usd(estimate.usd.mean)}{_interval(estimate.usd, '${:,.4g}')}{each}"


def _interval(estimate: Range | None, form: str) -> str:
    """The 95 % interval of an estimate, where there is one."""
    if estimate is None or not estimate.is_known:
        return ""
    return f" [{form.format(estimate.low)}, {form.format(estimate.high)}]"
