"""Secrets planted wherever users have them, and every byte that commands write."""

from __future__ import annotations

from tests import canaries
from tests.chaos.scene import Figures, Scene
from tests.cli.projects import finished
from tests.cli.test_canaries import SCRIPTED

_ISOLATIONS = ("none", "process")
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


def plant(scene: Scene) -> Figures:
    """All commands on projects in which agents, tools, evaluators and endpoints repeat what they know."""
    commands = read = 0
    leaked, problems = list[str](), list[str]()
    for isolation in _ISOLATIONS[: 1 if scene.quick else None]:
        scene.note(f"canaries, isolation: {isolation}")
        folder, outputs = scene.folder / f"canaries-{isolation}", dict[str, str]()
        general = {"isolation": isolation, "max_concurrency": 2} if isolation != "none" else {}
        config = {"storage": f"file://{folder / 'backup'}", "eval": {"general": general}}
        with canaries.planted(folder, SCRIPTED | config) as project:
            for words, code in _COMMANDS:
                done = finished(*words.split(), folder=folder, environment=project.environment)
                outputs[words] = done.stdout + done.stderr
                if code is not None and done.returncode != code:
                    said = f"{words} ended with {done.returncode}: {outputs[words][-300:]}"
                    problems.append(f"isolation {isolation}: {said}")
            leaked += canaries.leaks(project, outputs)
        commands += len(outputs)
        read += sum(map(len, outputs.values()))
        read += sum(path.stat().st_size for path in canaries.written(folder))
        for place in ("runs", "backup"):
            others = canaries.readable_by_others(folder / place)
            problems += [f"others can read {path}" for path in others if "/backend" not in path]
    figures = {"leaked_secrets": len(leaked), "commands": commands, "bytes_read": read}
    return figures | {"problems": [*leaked, *problems]}
