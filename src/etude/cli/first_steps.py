"""First steps: `etude init`, `check`, `doctor`, `demo` and `skill`.

They write files to start from, tell whether a config would run and what it costs, and train a tiny agent.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict
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
    RunsFolder,
    argument,
    on_cluster,
    on_error,
    option,
    refuse,
    run_async,
)
from etude.cli.console import (
    STATUS_SIGNS,
    emit,
    next_step,
    say,
    say_fact,
    say_wrapped,
    show_findings,
    shown_path,
    table,
    unused_folder,
)
from etude.core.secrets import mask_secrets

if TYPE_CHECKING:
    from etude.core.stats import Estimate
    from etude.preflight.demo import DemoReport
    from etude.preflight.estimate import RunEstimate

Project = Literal["larger", "tickets", "sql", "game", "tool"]
"""The folders in `preflight/starter_files`."""
Task = Literal["calculator", "tictactoe", "sort", "extraction"]


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
    from etude.models.source import PACKAGED
    from etude.preflight.starter import write_starter

    chosen = PACKAGED if model is None else model
    if Path(chosen).is_dir():
        chosen = str(Path(chosen).absolute())
    written = write_starter(folder, task or "larger", chosen)
    if as_json:
        emit({"folder": str(folder.absolute()), "files": [path.name for path in written], "model": chosen})
        return
    for path in written:
        say(f"wrote {shown_path(path)}")
    if model is None:
        say(f"model {chosen}, from the Hugging Face hub; choose another with --model")
    next_step(f"cd {shlex.quote(shown_path(folder))} && {hints.command('check', 'config.yml')}")


def skill(
    to: Annotated[Path, option("The folder for SKILL.md.", show_default=True)] = Path(".claude/skills/etude"),
    as_json: AsJson = False,
) -> None:
    """Write a skill by which a coding agent sets up, trains and diagnoses runs."""
    from etude.store.files import write_new_files

    text = Path(__file__).with_name("skill.md").read_text(encoding="utf-8")
    (written,) = write_new_files(to, {"SKILL.md": text})
    if as_json:
        emit({"file": str(written.absolute())})
        return
    say(f"wrote {shown_path(written)}")
    next_step(hints.new_project())


def demo(
    task: Annotated[Task | None, option("What a tiny model learns, the calculator by default.")] = None,
    real: Annotated[bool, option("A pretrained model learns to read customers' tickets.", "--real")] = False,
    seed: Annotated[int, option("Seed of every random choice.", min=0)] = 0,
    out: Annotated[Path | None, option("Folder for everything; by default demo-TASK here.")] = None,
    on: OnCluster = None,
    as_json: AsJson = False,
) -> None:
    """Watch a tiny model learn: no GPU, no download, no account. With --real, a pretrained one learns.

    The tiny model is made from scratch and warmed up. Then it is trained through the ordinary machinery:
    config, workflow, evaluators, trajectory builder, local adapter, store.

    The calculator takes 28 to 31 s on two idle cores, at first 73 s, and 199 s on a busy machine.
    """
    if real:
        refuse("--real, where one task is learnt", task=task)
    from etude.models.source import PACKAGED
    from etude.preflight.demo import PRETRAINED, TASKS, run_demo
    from etude.show.progress import progress_for

    learned = PRETRAINED if real else task or "calculator"
    folder = (out or unused_folder(Path(f"demo-{'real' if real else learned}"), "-")).absolute()
    if not as_json:
        pretrained = f"{PACKAGED} learns to read customers' messages into the fields of a ticket."
        say(pretrained if real else f"A tiny model, made from scratch on this machine, {TASKS[learned]}.")
        say(f"Everything is written to {shown_path(folder)}.\n")
    kind = ["--real"] if real else ["--task", learned]

    def again() -> str:
        """Return the command that repeats the demo in another folder."""
        elsewhere = [] if out is None else ["--out", shown_path(unused_folder(out))]
        return hints.command("demo", *kind, "--seed", str(seed), *elsewhere)

    with on_error(again), progress_for(json=as_json) as progress:
        report = run_async(run_demo(learned, seed, folder, progress, on_cluster(on)))
    if as_json:
        emit({"event": "demo", "task": learned, "seed": seed, **asdict(report)})
    else:
        _show(report)


def _show(report: DemoReport) -> None:
    from etude.core.history import Score

    stages = {"before": report.before, "after demonstrations": report.demonstrated, "after": report.after}
    stages["after, greedy"] = report.greedy
    measured = {when: stage["scores"] for when, stage in stages.items() if stage is not None}
    rows = []
    for name, last in report.after["scores"].items():
        label = f"{name} (reward)" if name == report.after["reward"] else name
        means = (str(Score.model_validate(scores[name])) for scores in measured.values())
        rows.append((label, *means, last["n"]))
    say()
    title = "mean and 95 % interval over held-out episodes, at temperature 1"
    table(("", *measured, "episodes"), rows, title=title)
    for when, transcript in report.transcripts.items():
        say(f"{when} training\n{transcript}")
    say_fact("plot", shown_path(report.plot))
    say_fact("trained model", shown_path(report.model))
    say_fact("agent, config", shown_path(report.folder))
    say_fact("took", f"{report.seconds:.0f} s")
    next_step(hints.new_project())


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


def _show_estimate(estimate: RunEstimate) -> None:
    from etude.engines.ledger import format_usd

    for warning in estimate.warnings:
        say_wrapped(f"{STATUS_SIGNS['warning']} {warning}")
    training, validation = estimate.training_episodes, estimate.validation_episodes
    say()
    say_fact("episodes", f"{training:,} to train on + {validation:,} to validate")
    if not estimate.measured_on:
        say_fact("tokens", "measure calls, tokens and their price on a few episodes: --play 8")
        return
    say_fact("calls", f"about {estimate.calls:,}")
    prompt, sampled = estimate.prompt_tokens, estimate.completion_tokens
    apart = _interval(estimate.tokens, "{:,.0f}")
    say_fact("tokens", f"about {prompt:,} in prompts, {sampled:,} sampled{apart}")
    if estimate.usd is not None:
        money = format_usd(estimate.usd.mean) + _interval(estimate.usd, "${:,.4g}")
        say_fact("price", f"about {money} for calls")
    say_fact("measured on", f"{estimate.measured_on} episodes played with the models as they are now")


def _interval(estimate: Estimate | None, form: str) -> str:
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
