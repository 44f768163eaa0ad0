"""The short run that is harmed: three epochs of a tiny model in deterministic mode, and all that it keeps."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster_project import differences

ROOT = Path(__file__).parents[1]
# Its project, and its processes that start in milliseconds, are those of the tests.
sys.path.insert(0, str(ROOT))

from tests.cli.killed import everything, repeatable_project  # noqa: E402
from tests.cli.projects import finished  # noqa: E402
from tests.forked import Forked  # noqa: E402

NAME = "run"

TRAIN = ("train", "config.yml", "--name", NAME, "-o", "storage=null")


@dataclass
class Outcome:
    """The ends of the runs that were harmed."""

    harmed: int = 0
    unequal: list[str] = field(default_factory=list)
    """Runs that ended well and are not as the one that nobody disturbed, each with its first differences."""
    refused: int = 0
    """Runs that were not gone on with, with an error that says so."""
    failures: list[str] = field(default_factory=list)
    """Runs that should have gone on and did not."""

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "harmed": self.harmed,
            "unequal_ends": len(self.unequal),
            "refused": self.refused,
            "failures": len(self.failures),
            "examples": [*self.unequal, *self.failures][:10],
        }


class ShortRun:
    """The project, and what its run keeps when nobody disturbs it."""

    def __init__(self, folder: Path) -> None:
        from etude.models.tiny import build_policy, build_tokenizer

        base = folder / "base"
        build_policy(build_tokenizer(["t0?", "v0?", "0123456789"], splits=["[0-9]"]), 0).export(base)
        self.folder = repeatable_project(folder / "project", base)
        done = finished(*TRAIN, "--json", folder=self.folder)
        if done.returncode != 0:
            raise SystemExit(f"the run that nobody disturbs fails: {done.stderr[-2000:]}")
        self.expected = everything(self.path)
        shutil.rmtree(self.path)

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder / "runs" / NAME

    def clear(self) -> None:
        """Begin anew."""
        shutil.rmtree(self.folder / "runs", ignore_errors=True)

    def victim(self, number: int, counts: Path, *arguments: str) -> tuple[int, str]:
        """The exit code and errors of a command that is killed at one of its file operations; 0: at none."""
        script = str(Path(__file__).with_name("chaos_victim.py"))
        runs = str(self.folder / "runs")
        process = Forked(
            [script, runs, str(number), str(counts), *arguments],
            self.folder,
            dict(os.environ),
            program="python",
        )
        _, errors = process.communicate(timeout=120)
        return process.wait(), errors

    def goes_on(self) -> tuple[int, str]:
        """The exit code of going on with the run, or of beginning it, and its errors."""
        command: Sequence[str] = ("resume", NAME)
        if not (self.path / "config.yml").exists() or not (self.path / "run.db").exists():
            command = TRAIN
        done = finished(*command, "--json", folder=self.folder)
        return done.returncode, done.stderr

    def differences(self) -> list[str]:
        """The steps in which the run is not as it should be."""
        return differences(self.expected, everything(self.path))
