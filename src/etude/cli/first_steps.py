"""First steps: `etude init` and `etude skill` write files to start from, and `etude demo` trains an agent."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from etude.cli import hints
from etude.cli.command import AsJson, OnCluster, argument, on_cluster, on_error, option, refuse, run_async
from etude.cli.console import emit, next_step, say, shown_path, table, unused_folder

if TYPE_CHECKING:
    from etude.preflight.demo import DemoReport

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

    The calculator takes 28 to 31 s on two idle cores. The first run there took 73 s, and one on a busy
    machine 199 s.
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
    say(f"plot            {shown_path(report.plot)}")
    say(f"trained model   {shown_path(report.model)}")
    say(f"agent, config   {shown_path(report.folder)}")
    say(f"took            {report.seconds:.0f} s")
    next_step(hints.new_project())
