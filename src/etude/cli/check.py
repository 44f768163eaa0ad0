"""`etude check CONFIG`: check whether a config would run, and estimate its cost."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from etude.cli import hints
from etude.cli.command import AsJson, ConfigFile, OnCluster, Overrides, on_cluster, option, run_async
from etude.cli.console import STATUS_SIGNS, next_step, say, say_wrapped, show_findings

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
    from etude.loop.lifecycle import names_secret
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
            # Do not print typed secrets again.
            secrets = [each for each in override if names_secret(settings, each)]
            if secrets:
                keys = (each.partition("=")[0] for each in secrets)
                say(f"\ngive the secrets again: {' '.join(f'-o {key}=…' for key in keys)}")
            rest = (word for each in override if each not in secrets for word in ("-o", each))
            next_step(hints.command("train" if settings.finetuning.enabled else "evaluate", config, *rest))
        else:
            say(f"\nfix what is marked {STATUS_SIGNS['error']}, and check again")
    if not report.is_ready:
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
        by_model = [f"{name} {format_usd(usd)}" for name, usd in estimate.usd_by_model.items()]
        each = f", {', '.join(by_model)}" if len(by_model) > 1 else ""
        money = f"{format_usd(estimate.usd.mean)}{_interval(estimate.usd, '${:,.4g}')}{each}"
        say_wrapped(f"price           about {money} for calls")
    if estimate.training_usd is not None:
        say(f"price           at most about ${estimate.training_usd:,.2f} for training")
    say(f"measured on     {estimate.measured_on} episodes played with the models as they are now")


def _interval(estimate: Range | None, form: str) -> str:
    """Return the 95 % interval of an estimate as text, or nothing if there is none."""
    if estimate is None or not math.isfinite(estimate.high):
        return ""
    return f" [{form.format(estimate.low)}, {form.format(estimate.high)}]"
