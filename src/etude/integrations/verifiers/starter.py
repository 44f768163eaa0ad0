"""The project that `etude init --env verifiers` writes."""

from __future__ import annotations

from pathlib import Path

from etude.config.supplies import Starter

_FILE = Path(__file__).parent / "starter_files" / "my_env.py.txt"


def starter_of(task: str | None) -> Starter:
    """An environment of one's own to change, or with `task` the config of a package that is installed."""
    workflow = {"_type": "verifiers", "environment": task or "my_env"}
    files = {} if task else {"my_env.py": _FILE.read_text(encoding="utf-8")}
    return Starter({"workflow": workflow}, files)
