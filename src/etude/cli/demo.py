"""`etude demo`: one command, and an agent learns. `etude init FOLDER`: a project to start from."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from etude.cli import hints
from etude.cli.command import AsJson, OnCluster, argument, on_cluster, option, refuse, run_async, then
from etude.cli.console import emit, next_step, path_shown, say, table, unused
from etude.core.stats import shown_mean

if TYPE_CHECKING:
    from etude.demo.demo import DemoReport

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
        rows.append((label, *(_interval(scores[name]) for scores in measured.values()), last["n"]))
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


def _interval(scores: dict[str, Any]) -> str:
    if scores["mean"] is None:
        return "none"
    return shown_mean(scores["mean"], scores["low"], scores["high"])
