"""`etude check CONFIG`: would it run, and what would it take. `etude doctor [CONFIG]`: does all work here."""

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
    argument,
    on_cluster,
    option,
    run_async,
)
from etude.cli.console import MARKS, next_step, say, say_wrapped, show_findings

if TYPE_CHECKING:
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
            # Secrets that were typed are not repeated.
            secrets = [each for each in override if names_secret(settings, each)]
            if secrets:
                keys = (each.partition("=")[0] for each in secrets)
                say(f"\nadd again what is secret: {' '.join(f'-o {key}=…' for key in keys)}")
            rest = (word for each in override if each not in secrets for word in ("-o", each))
            next_step(hints.command("train" if report.trains else "evaluate", config, *rest))
        else:
            say(f"\nmend what is marked {MARKS['error']}, and check again")
    if not report.is_ready:
        raise typer.Exit(2)


def _show_estimate(estimate: Estimate) -> None:
    from etude.budget.ledger import shown_usd

    for warning in estimate.warnings:
        say_wrapped(f"{MARKS['warning']} {warning}")
    training, validation = estimate.training_episodes, estimate.validation_episodes
    say(f"\nepisodes        {training:,} to train on + {validation:,} to validate")
    say(f"calls           about {estimate.calls:,}")
    prompt, sampled = estimate.prompt_tokens, estimate.completion_tokens
    apart = _interval(estimate.tokens, "{:,.0f}")
    say(f"tokens          about {prompt:,} in prompts, {sampled:,} sampled{apart}")
    if estimate.usd is not None:
        by_model = [f"{name} {shown_usd(usd)}" for name, usd in estimate.usd_by_model.items()]
        each = f", {', '.join(by_model)}" if len(by_model) > 1 else ""
        money = f"{shown_usd(estimate.usd.mean)}{_interval(estimate.usd, '${:,.4g}')}{each}"
        say_wrapped(f"price           about {money} for calls")
    if estimate.training_usd is not None:
        say(f"price           at most about ${estimate.training_usd:,.2f} for training")
    for assumption in estimate.assumptions:
        say_wrapped(f"assuming        {assumption}")


def _interval(estimate: Range | None, form: str) -> str:
    """The 95 % interval of an estimate, where there is one."""
    if estimate is None or not math.isfinite(estimate.high):
        return ""
    return f" [{form.format(estimate.low)}, {form.format(estimate.high)}]"


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
    as_json: AsJson = False,
) -> None:
    """Look at the installation, the machine, and a config's services, and try the whole loop."""
    from etude.config.load import load_config
    from etude.preflight.doctor import can_try_loop, examine, try_loop
    from etude.preflight.finding import Findings
    from etude.preflight.services import examine_services

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
