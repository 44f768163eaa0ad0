"""`etude demo`: train an agent with one command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from etude.cli.command import AsJson, OnCluster, on_cluster, option, refuse, run_async
from etude.cli.console import say, shown_path, unused_folder
from etude.cli.train import train_and_show

Task = Literal["calculator", "tictactoe", "sort", "extraction"]


def demo(
    task: Annotated[Task | None, option("What a tiny model learns, the calculator by default.")] = None,
    real: Annotated[bool, option("A pretrained model learns to read customers' tickets.", "--real")] = False,
    seed: Annotated[int, option("Seed of every random choice.", min=0)] = 0,
    out: Annotated[Path | None, option("Folder for everything; by default demo-TASK here.")] = None,
    on: OnCluster = None,
    as_json: AsJson = False,
) -> None:
    """Watch a tiny model learn: no GPU, no download, no account. With --real, a pretrained one learns.

    The tiny model is made from scratch and warmed up. Then it is trained as `etude train` does, with the
    config in the folder.

    The calculator takes 28 to 31 s on two idle cores. The first run there took 73 s, and one on a busy
    machine 199 s.
    """
    if real:
        refuse("--real, where one task is learnt", task=task)
    from etude.config.load import load_config
    from etude.loop.lifecycle import new_run
    from etude.models.source import PACKAGED
    from etude.preflight.starter import PRETRAINED, TASKS, make_demo_model, write_demo
    from etude.show.progress import progress_for

    learned = PRETRAINED if real else task or "calculator"
    folder = (out or unused_folder(Path(f"demo-{'real' if real else learned}"), "-")).absolute()
    if not as_json:
        pretrained = f"{PACKAGED} learns to read customers' messages into the fields of a ticket."
        say(pretrained if real else f"A tiny model, made from scratch on this machine, {TASKS[learned]}.")
        say(f"Everything is written to {shown_path(folder)}.\n")
    write_demo(learned, folder)
    if not real:
        with progress_for(json=as_json) as progress:
            run_async(make_demo_model(folder, seed, progress))
    output_dir = json.dumps(str(folder / "runs"), ensure_ascii=False)
    overrides = [f"finetuning.seed={seed}", f"finetuning.output_dir={output_dir}", *on_cluster(on)]
    settings = load_config(folder / "config.yml", overrides)
    with new_run(settings, "training") as run:
        train_and_show(settings, run, as_json=as_json)
