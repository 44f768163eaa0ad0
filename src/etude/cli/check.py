"""`etude check CONFIG`: would it run, and what would it cost? `etude doctor`: does everything work here?"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from etude.cli import hints
from etude.cli.command import (
    RUNS,
    AsJson,
    ConfigFile,
    OnCluster,
    Overrides,
    RunsFolder,
    argument,
    on_cluster,
    option,
    run_async,
)
from etude.cli.console import STATUS_SIGNS, next_step, say, say_wrapped, show_findings
from etude.core.secrets import mask_secrets

if TYPE_CHECKING:
    from etude.preflight.estimate import Estimate, Range


def check(
    config: ConfigFile,
    override: Overrides = None,
    on: OnCluster = None,
    play: Annotated[int, option("Play training episodes, to measure what they cost.", min=0, max=10_000)] = 0,
    as_json: AsJson = False,
) -> None:
    """Check a config, its agent, data and models, and estimate the run.

    Nothing is sampled unless you give --play.
    """
    from etude.config.load import load_config
    from etude.preflight.check import check_config

    override = [*(override or ()), *on_cluster(on)]
    settings = load_config(config, override)
    findings, estimate = run_async(check_config(settings, play=play))
    is_ready = not findings.has_errors
    show_findings(findings, {"ready": is_ready, "estimate": estimate and asdict(estimate)}, as_json)
    if not as_json:
        if estimate is not None:
            _show_estimate(estimate)
        if is_ready:
            rest = (word for each in override for word in ("-o", each))
            command = hints.command("train" if settings.finetuning.enabled else "evaluate", config, *rest)
            next_step(mask_secrets(command))
        else:
            say(f"\nfix what is marked {STATUS_SIGNS['error']}, and check again")
    if not is_ready:
        raise typer.Exit(2)


def _show_estimate(estimate: Estimate) -> None:
    from etude.engines.ledger import format_usd

    for warning in estimate.warnings:
        say_wrapped(f"{STATUS_SIGNS['warning']} {warning}")
    training, validation = estimate.training_episodes, estimate.validation_episodes
    say(f"\nepisodes        {training:,} to train on + {validation:,} to validate")
    if not estimate.measured_on:
        say("tokens          measure calls, tokens and their price on a few episodes: --play 8")
        return
    say(f"calls           about {estimate.calls:,}")
    prompt, sampled = estimate.prompt_tokens, estimate.completion_tokens
    apart = _interval(estimate.tokens, "{:,.0f}")
    say(f"tokens          about {prompt:,} in prompts, {sampled:,} sampled{apart}")
    if estimate.usd is not None:
        money = f"{format_usd(estimate.usd.mean)}{_interval(estimate.usd, '${:,.4g}')}"
        say(f"price           about {money} for calls")
    say(f"measured on     {estimate.measured_on} episodes played with the models as they are now")


def _interval(estimate: Range | None, form: str) -> str:
    """Return the 95 % interval of an estimate as text, or nothing if there is none."""
    if estimate is None or not math.isfinite(estimate.high):
        return ""
    return f" [{form.format(estimate.low)}, {form.format(estimate.high)}]"


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
    from etude.preflight.check import examine, examine_services

    settings = None if config is None else load_config(config, override or ())
    findings = examine(output_dir or (RUNS if settings is None else settings.finetuning.output_dir))
    if settings is not None:
        run_async(examine_services(settings, findings))
    is_well = not findings.has_errors
    show_findings(findings, {"well": is_well}, as_json)
    if not is_well:
        if not as_json:
            say(f"\nfix what is marked {STATUS_SIGNS['error']}")
        raise typer.Exit(1)
    if not as_json:
        next_step(hints.new_project() if config is None else hints.command("check", config))
