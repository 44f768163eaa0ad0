"""`etude demo`: one command, and an agent learns."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from etude.cli import hints
from etude.cli.command import AsJson, OnCluster, on_cluster, option, refuse, run_async, then
from etude.cli.console import emit, next_step, path_shown, say, table, unused
from etude.core.stats import shown_mean

if TYPE_CHECKING:
    from etude.demo.real import RealReport
    from etude.demo.report import DemoReport


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
    name = "real" if real else task or "calculator"
    folder = (out or unused(Path(f"demo-{name}"), "-")).absolute()
    if real:
        _real(seed, folder, out, on, as_json=as_json)
    else:
        _tiny(task or "calculator", method or "grpo", seed, folder, out, on, as_json=as_json)


def _tiny(
    task: Task, method: Method, seed: int, folder: Path, out: Path | None, on: str | None, *, as_json: bool
) -> None:
    from etude.demo.demo import TASKS, run_demo
    from etude.report.progress import progress_for

    if not as_json:
        say(f"A tiny model, made from scratch on this machine, {TASKS[task].introduction}.")
        say(f"Everything is written to {path_shown(folder)}.\n")
    again = ("--task", task, "--method", method)
    with then(lambda: hints.demo_again(again, seed, out)), progress_for(json=as_json) as progress:
        report = run_async(run_demo(task, method, seed, folder, progress, on_cluster(on)))
    if as_json:
        emit({"event": "demo", "task": task, "method": method, "seed": seed, **asdict(report)})
    else:
        _show(report)


def _real(seed: int, folder: Path, out: Path | None, on: str | None, *, as_json: bool) -> None:
    from etude.demo.real import TASK, run_real_demo
    from etude.preflight.starter import MODEL
    from etude.report.progress import progress_for

    if not as_json:
        say(f"{MODEL} learns to read customers' messages into the fields of a ticket.")
        say(f"Everything is written to {path_shown(folder)}.\n")
    with then(lambda: hints.demo_again(("--real",), seed, out)), progress_for(json=as_json) as progress:
        report = run_async(run_real_demo(seed, folder, progress, on_cluster(on)))
    if as_json:
        emit({"event": "demo", "task": TASK, "model": MODEL, "seed": seed, **asdict(report)})
    else:
        _show_real(report)


def _show(report: DemoReport) -> None:
    rows = []
    for name, before in report.before["scores"].items():
        after, greedy = report.after["scores"][name], report.greedy["scores"][name]
        label = f"{name} (reward)" if name == report.before["reward"] else name
        rows.append((label, *map(_interval, (before, after, greedy)), after["n"]))
    for variant in report.variants:
        for name, before in variant.before["scores"].items():
            after = variant.after["scores"][name]
            rows.append((f"{name}, {variant.name}", _interval(before), _interval(after), "", after["n"]))
    say()
    title = "mean and 95 % interval over held-out episodes, at temperature 1"
    table(("", "before", "after", "after, greedy", "episodes"), rows, title=title)
    _show_rest(report)


def _show_real(report: RealReport) -> None:
    rows = []
    for stage in report.stages:
        reward = stage.sampled["reward"]
        sampled, greedy = stage.sampled["scores"][reward], stage.greedy and stage.greedy["scores"][reward]
        rows.append((stage.name, _interval(sampled), greedy and _interval(greedy), sampled["n"]))
    say()
    title = "answers whose fields are all right: mean and 95 % interval over held-out messages"
    table(("", "at temperature 1", "greedy", "messages"), rows, title=title)
    _show_rest(report)


def _show_rest(report: DemoReport | RealReport) -> None:
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


def _interval(scores: dict[str, Any]) -> str:
    if scores["mean"] is None:
        return "none"
    return shown_mean(scores["mean"], scores["low"], scores["high"])
