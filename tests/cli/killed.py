"""Commands that are killed, and all that their runs keep."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from etude.store.journal import read_states
from etude.store.run_folder import CONFIG_STEP, RunFolder
from tests.cli.projects import change, local_project, process
from tests.support import without_times


def repeatable_project(folder: Path, base: Path) -> Path:
    """A project that trains the same each time, and keeps all versions."""
    config = local_project(folder, base)
    change(
        config,
        finetuning__deterministic=True,
        finetuning__num_epochs=3,
        trainer_adapters__local__lora={"r": 4},
        trainers={"epochs": {"_type": "epochs", "keep_checkpoints": "all"}},
    )
    return folder


def killed_after(count: int, *arguments: Any, folder: Path, seconds: float = 0.0) -> bool:
    """Run a command and kill it some time after so many events; False when it was over before."""
    running = process(*arguments, "--json", folder=folder)
    for _ in range(count):
        if not running.stdout.readline():
            break
    time.sleep(seconds)
    running.kill()
    running.communicate()
    return running.returncode == -9


def everything(run: Path, *others: str) -> dict[str, Any]:
    """Calls, episodes, scores, epochs and versions, with the digests of their weights, but for times.

    Not the config, the bill, keys that each run draws, and fields that are called as `others`.
    """
    with RunFolder.read(run) as opened:
        kept = {
            key: value
            for key, value in opened.journal.scan()
            if not key.startswith(("record/", "spent/")) and key not in (CONFIG_STEP, "run/key")
        }
        for target, found in read_states(opened.journal).items():
            state = {name: value for name, value in vars(found).items() if name != "_history"}
            kept[f"state of {target}"] = TypeAdapter(Any).dump_python(state, mode="json")
    text = (
        json.dumps(without_times(kept, *others))
        .replace(str(run.parent), "RUNS")
        .replace(str(run.parent.parent), "PROJECT")
    )
    return dict(json.loads(text))
