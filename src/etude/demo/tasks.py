"""The tasks of the demo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Task:
    """What is learnt; its code and config are the example of the same name."""

    name: str
    introduction: str
    """Goes on after `A tiny model …`."""
    variants: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    """Other circumstances to measure the agent in, as overrides of the config, by what they are called."""


TASKS = {
    task.name: task
    for task in (
        Task("calculator", "learns to use a calculator: a question, a tool call, the result, the answer"),
        Task(
            "tictactoe",
            "learns tic-tac-toe against a random opponent; a random player who knows the rules gets 0.5",
            {"against an optimal opponent": (("workflow.arguments.opponent", "optimal"),)},
        ),
        Task("sort", "learns to sort letters"),
    )
}
