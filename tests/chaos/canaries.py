"""Secrets planted wherever users have them, and every byte that commands write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests import canaries
from tests.chaos.scene import Figures, Scene
from tests.cli.projects import process
from tests.cli.test_canaries import SCRIPTED

_ISOLATIONS = ("none", "process")
_SECONDS = 120.0
_COMMANDS = (
    ("train config.yml --name r", 0),
    ("resume r -o finetuning.num_epochs=2", 0),
    ("runs show r", 0),
    ("runs check r", 0),
    ("episodes show train/2/t3/0 --run r", 0),
    ("export r", None),
    ("evaluate config.yml --name e --json", 0),
    ("check config.yml", 0),
    ("doctor config.yml", 1),
    ("train config.yml --name d --debug -o finetuning.error_budget=0.0", 1),
    ("train config.yml --name w -o workflow.function=agent:gone", 2),
)
"""With the exit code of each, where there is one that it has to have."""


@dataclass
class _Ends:
    commands: int = 0
    bytes: int = 0
    leaked: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def plant(scene: Scene) -> Figures:
    """All commands on projects in which agents, tools, evaluators and endpoints repeat what they know."""
    ends = _Ends()
    for isolation in _ISOLATIONS[: 1 if scene.quick else None]:
        scene.note(f"canaries, isolation: {isolation}")
        general = {"isolation": isolation, "max_concurrency": 2}
        _play(scene, isolation, {"eval": {"general": general if isolation != "none" else {}}}, ends)
    return {
        "leaked_secrets": len(ends.leaked),
        "commands": ends.commands,
        "bytes_read": ends.bytes,
        "problems": [*ends.leaked, *ends.problems],
    }


def _play(scene: Scene, isolation: str, config: Mapping[str, Any], ends: _Ends) -> None:
    folder = scene.folder / f"canaries-{isolation}"
    storage = {"storage": f"file://{folder / 'backup'}"}
    outputs: dict[str, str] = {}
    with canaries.planted(folder, SCRIPTED | storage | config) as project:
        for words, code in _COMMANDS:
            started = process(*words.split(), folder=folder, environment=project.environment)
            output, errors = started.communicate(timeout=_SECONDS)
            ends.commands += 1
            ends.bytes += len(output) + len(errors)
            if code is not None and started.wait() != code:
                said = (output + errors)[-300:]
                ends.problems.append(f"isolation {isolation}: {words} ended with {started.wait()}: {said}")
            outputs[words] = output + errors
        ends.leaked += canaries.leaks(project, outputs)
        ends.bytes += sum(path.stat().st_size for path in canaries.written(folder))
        for place in ("runs", "backup"):
            others = canaries.readable_by_others(folder / place)
            ends.problems += [f"others can read {path}" for path in others if "/backend" not in path]
