"""Where one starts: `etude init FOLDER`, `etude demo`, `etude check CONFIG` and `etude doctor [CONFIG]`."""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

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
    refuse,
    run_async,
    then,
)
from etude.cli.console import (
    MARKS,
    emit,
    next_step,
    path_shown,
    say,
    say_wrapped,
    show_findings,
    table,
    unused,
)
from etude.core.stats import shown_mean

if TYPE_CHECKING:
    from etude.demo.demo import DemoReport
    from etude.preflight.estimate import Estimate, Range

Project = Literal["larger", "tickets", "sql", "game", "tool"]
"""The folders of `preflight/starter_files`."""


def init(
    folder: Annotated[Path, argument("The folder to make.")],
    task: Annotated[
        Project | None,
        option(
            "What the agent does: names the larger of two numbers (the default), reads tickets, writes SQL, "
            "plays a guessing game, uses a tool."
        ),
    ] = None,
    model: Annotated[
        str | None, option("The model to start from: a folder, or a name on the Hugging Face hub.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a small project that runs: an agent, examples, a config."""
    from etude.preflight.starter import MODEL, write_starter

    chosen = MODEL if model is None else model
    if Path(chosen).is_dir():
        chosen = str(Path(chosen).absolute())
    written = write_starter(folder, task or "larger", chosen)
    if as_json:
        emit({"folder": str(folder.absolute()), "files": [path.name for path in written], "model": chosen})
        return
    for path in written:
        say(f"wrote {path_shown(path)}")
    if model is None:
        say(f"model {chosen}: {_origin(chosen)}; choose another with --model")
    next_step(f"cd {shlex.quote(path_shown(folder))} && {hints.command('check', 'config.yml')}")


def _origin(model: str) -> str:
    """Where a model of the hub comes from when it is first used; the hub is not asked."""
    from etude.models.source import cached_folder, packaged_folder

    if find_spec("huggingface_hub") is not None and (cached := cached_folder(model)) is not None:
        return f"here already, in {cached}"
    made = f"; where the hub does not answer, {packaged_folder()}" if packaged_folder().is_dir() else ""
    return f"downloaded from the Hugging Face hub when it is first used, 270 MB{made}"


Task = Literal["calculator", "tictactoe", "sort", "extraction"]
Method = Literal["grpo", "dpo", "expert_iteration"]


def demo(
    task: Annotated[Task | None, option("What a tiny model learns, the calculator by default.")] = None,
    method: Annotated[Method | None, option("How it learns, by GRPO by default.")] = None,
    real: Annotated[bool, option("A pretrained model learns to read customers' tickets.", "--real")] = False,
    seed: Annotated[int, option("Seed of every random choice.", min=0)] = 0,
    out: Annotated[Path | None, option("Folder for everything; by default demo-TASK here.")] = None,
    on: OnCluster = None,
    as_json: AsJson = False,
) -> None:
    """Watch a tiny model learn: no GPU, no download, no account. Or, with --real, a pretrained one.

    The tiny model is made from scratch, warmed up, and then trained through the ordinary machinery: config,
    workflow, evaluators, trajectory builder, local adapter, store.

    The calculator takes 28 to 31 s on two idle cores; the first run on such a machine took 73 s, and one
    on a busy machine 199 s.
    """
    if real:
        refuse("--real, where one task is learnt by GRPO", task=task, method=method)
    from etude.demo.demo import PRETRAINED, TASKS, run_demo
    from etude.preflight.starter import MODEL
    from etude.report.progress import progress_for

    learned, method = PRETRAINED if real else task or "calculator", method or "grpo"
    folder = (out or unused(Path(f"demo-{'real' if real else learned}"), "-")).absolute()
    if not as_json and real:
        say(f"{MODEL} learns to read customers' messages into the fields of a ticket.")
    elif not as_json:
        say(f"A tiny model, made from scratch on this machine, {TASKS[learned]}.")
    if not as_json:
        say(f"Everything is written to {path_shown(folder)}.\n")
    kind = ["--real"] if real else ["--task", learned, "--method", method]

    def again() -> str:
        """It begins anew, in another folder."""
        elsewhere = [] if out is None else ["--out", path_shown(unused(out))]
        return hints.command("demo", *kind, "--seed", str(seed), *elsewhere)

    with then(again), progress_for(json=as_json) as progress:
        report = run_async(run_demo(learned, method, seed, folder, progress, on_cluster(on)))
    if as_json:
        emit({"event": "demo", "task": learned, "method": method, "seed": seed, **asdict(report)})
    else:
        _show(report)


def _show(report: DemoReport) -> None:
    stages = {"before": report.before, "after demonstrations": report.demonstrated, "after": report.after}
    stages["after, greedy"] = report.greedy
    measured = {when: stage["scores"] for when, stage in stages.items() if stage is not None}
    rows = []
    for name, last in report.after["scores"].items():
        label = f"{name} (reward)" if name == report.after["reward"] else name
        all_scores = (scores[name] for scores in measured.values())
        means = (
            "none" if own["mean"] is None else shown_mean(own["mean"], own["low"], own["high"])
            for own in all_scores
        )
        rows.append((label, *means, last["n"]))
    say()
    title = "mean and 95 % interval over held-out episodes, at temperature 1"
    table(("", *measured, "episodes"), rows, title=title)
    for shown in report.episodes:
        say(f"example {shown.example}")
        for when, lines in (("before", shown.before), ("after", shown.after)):
            say(f"  {when}")
            for line in lines:
                say(f"    {line}")
        say()
    say(f"plot            {path_shown(report.plot)}")
    say(f"trained model   {path_shown(report.model)}")
    say(f"agent, config   {path_shown(report.folder)}")
    say(f"took            {report.seconds:.0f} s")
    next_step(hints.new_project())


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
