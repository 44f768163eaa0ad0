"""The project that `etude init --env mcp` writes."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from etude.config.supplies import Starter
from etude.core.errors import RequestError

_FILES = Path(__file__).parent / "starter_files"


def starter_of(task: str | None) -> Starter:
    """A server to change with questions for it; `task` is the address or the command of another server.

    Raises RequestError for a command that has no end.
    """
    server: dict[str, Any] = {"_type": "mcp", "max_turns": 4}
    if task and task.startswith(("http://", "https://")):
        server["url"] = task
    else:
        server |= dict(zip(("command", "args"), _command(task or "python server.py"), strict=True))
    held_out = {"_type": "python", "function": "tasks:questions", "arguments": {"held_out": True}}
    blocks = {
        "workflow": server | {"scope": "shared"},
        "eval": {"general": {"dataset": "tasks:questions"}, "evaluators": {"correct": "tasks:correct"}},
        "finetuning": {"run_configuration": {"validation_dataset": held_out}},
    }
    files = {name: (_FILES / f"{name}.txt").read_text(encoding="utf-8") for name in ("server.py", "tasks.py")}
    return Starter(blocks, files)


def _command(text: str) -> tuple[str, list[str]]:
    try:
        command, *args = shlex.split(text)
    except ValueError as error:
        raise RequestError(f"'{text}' is no command: {error}") from error
    return command, args
