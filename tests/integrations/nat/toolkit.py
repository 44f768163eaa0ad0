"""A project of the toolkit's for tests, and its real program."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "nat_workflow"
REAL = "ETUDE_TEST_NAT"
SECONDS = 600
"""How long a program may take, on a machine that has other things to do."""


def program() -> str:
    """The toolkit's program that the environment names; without one the test is skipped."""
    found = os.environ.get(REAL)
    if not found:
        pytest.skip(f"{REAL} does not name the program of a NeMo Agent Toolkit")
    return found


def make_base(folder: Path) -> Path:
    """The examples and the base model of the sorting task."""
    script = ROOT / "examples" / "sort" / "base.py"
    subprocess.run([sys.executable, script, "--out", folder], check=True, capture_output=True)
    return folder


def make_site(folder: Path) -> Path:
    """A folder of modules with the entry points that the toolkit finds them by, as if installed."""
    found = folder / "agents-0.0.0.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: agents\nVersion: 0.0.0\n")
    (found / "entry_points.txt").write_text(
        "[nat.components]\nsorting = sorting\nnat_agents = nat_agents\n", encoding="utf-8"
    )
    shutil.copy(EXAMPLE / "sorting.py", folder)
    shutil.copy(Path(__file__).with_name("nat_agents.py"), folder)
    return folder


@dataclass(frozen=True)
class Project:
    """A folder with a config, and where its agents and its model are."""

    folder: Path
    site: Path
    base: Path

    @property
    def runs(self) -> list[Path]:
        """The run folders."""
        return sorted(path.parent for path in self.folder.glob("runs/*/run.db"))

    @property
    def validation(self) -> str:
        """The file of held-out examples."""
        return str(self.base / "validation.jsonl")

    def configure(self, **changes: Any) -> None:
        """Write the example's config, small; `changes` are by keys with `__` for the dots."""
        config = yaml.safe_load((EXAMPLE / "config.yml").read_text())
        config["llms"]["sorter"]["model_name"] = str(self.base / "model")
        config["eval"]["general"]["dataset"]["file_path"] = str(self.base / "train.jsonl")
        config["trajectory_builders"]["rollouts"]["builder"] |= {
            "num_generations": 8,
            "examples_per_epoch": 4,
        }
        config["finetuning"] |= {"num_epochs": 3, "output_dir": str(self.folder / "runs")}
        for key, value in changes.items():
            *path, last = key.split("__")
            place = config
            for step in path:
                place = place[step]
            place[last] = value
        (self.folder / "config.yml").write_text(yaml.safe_dump(config))

    def command(self, *more: str) -> list[str]:
        """`nat finetune` as a person types it: nothing is set but what there is to say."""
        return [program(), "finetune", "--config_file", "config.yml", *more]

    def environment(self) -> dict[str, str]:
        """With the checkout's own code, and the agents on the path."""
        paths = os.pathsep.join((str(self.site), str(ROOT / "src")))
        # LiteLLM, which the toolkit imports, would ask the internet first.
        return os.environ | {"PYTHONPATH": paths, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}

    def finetune(self, *more: str) -> subprocess.CompletedProcess[str]:
        """Run the command to its end."""
        return self.run(self.command(*more))

    def run(self, command: list[str], seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
        """Run a program in the project."""
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment(),
            text=True,
            check=False,
            timeout=seconds,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )


def journal(run: Path) -> dict[str, str]:
    """Everything that a run has journalled, as text; nothing while there is no run yet."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{run / 'run.db'}?mode=ro", uri=True)) as database:
            return dict(database.execute("SELECT key, value FROM steps"))
    except sqlite3.OperationalError:
        return {}


def calls(steps: dict[str, str]) -> dict[str, Any]:
    """The model calls among journalled steps."""
    return {key: json.loads(value) for key, value in steps.items() if "/call/" in key}
