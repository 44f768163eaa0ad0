"""What a run ran on: enough to run it again, and no secrets."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

_GIT_SECONDS = 5


def describe_environment(*, seed: int | None = None, folder: Path | None = None) -> dict[str, Any]:
    """Python, packages, machine, and the git commit of `folder` (the current one by default).

    Environment variables are left out on purpose: they hold keys.
    """
    return {
        "etude": importlib.metadata.version("etude"),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "seed": seed,
        "git": git_state(folder or Path.cwd()),
        "packages": _packages(),
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """`{"commit", "dirty"}` of the checkout that `folder` is in; None outside of one, or without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    return {"commit": commit, "dirty": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


@functools.cache
def _packages() -> dict[str, str]:
    found = importlib.metadata.distributions()
    versions = {found_one.metadata["Name"]: found_one.version for found_one in found}
    return {name: versions[name] for name in sorted(versions, key=lambda name: str(name).lower()) if name}
