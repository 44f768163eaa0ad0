"""Runs with limits, and how far over them they ended.

The endpoint charges for what it answers, and keeps the sum: what a run has taken is read there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.budget.endpoint import ChargingEndpoint
from tests.budget.project import CACHED, COMPLETION, PROMPT, charged_project
from tests.chaos.scene import Figures, Scene
from tests.cli.projects import finished

_AT_ONCE = (1, 4, 16, 64)
_REPEATS = (3, 1)
"""Of each limit, in full and with `--quick`."""
_STOPPED = 3
"""The exit code of a run at its limit."""


class _Slow(ChargingEndpoint):
    """Each answer takes some seconds, so that there are several at once."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """As the endpoint does, and then wait."""
        answer = super().answer(body)
        time.sleep(self._seconds)
        return answer


@dataclass(frozen=True)
class Limit:
    """A limit, and how much of it an endpoint has given."""

    name: str
    most: float
    taken: Callable[[ChargingEndpoint], float]


LIMITS = (
    Limit("usd", 0.02, lambda endpoint: endpoint.usd(PROMPT, CACHED, COMPLETION)),
    Limit("tokens", 6000, lambda endpoint: endpoint.prompt_tokens + endpoint.completion_tokens),
)
_HOURS = 0.002
_ONE_HOUR = 3600.0


def budgets(scene: Scene) -> Figures:
    """Runs that would take more than they may, with few and many calls at once."""
    problems: list[str] = []
    over: dict[str, float] = {}
    for limit in LIMITS:
        scene.note(f"runs at a limit of {limit.most:g} {limit.name}, with {_AT_ONCE} calls at once")
        ends = [
            _end(scene, limit, at_once, number, problems)
            for at_once in _AT_ONCE
            for number in range(_REPEATS[scene.quick])
        ]
        over[limit.name] = max(ends)
    late = _seconds_late(scene, problems)
    over["hours"] = late / _ONE_HOUR * 100
    return {
        "over_budget_percent": round(max(0.0, *over.values()), 3),
        "percent_over": {name: round(value, 3) for name, value in over.items()},
        "seconds_late": round(late, 2),
        "runs": len(LIMITS) * len(_AT_ONCE) * _REPEATS[scene.quick] + 1,
        "problems": problems,
    }


def _end(scene: Scene, limit: Limit, at_once: int, number: int, problems: list[str]) -> float:
    """How many percent over its limit a run ended; negative for those that stopped before it."""
    with _Slow(0.03 * (number + 1)) as endpoint:
        place = f"{limit.name}-{at_once}-{number}"
        code, errors, _ = _run(scene, place, endpoint, at_once, {limit.name: limit.most})
        taken = limit.taken(endpoint)
        if code != _STOPPED:
            problems.append(f"{place}: it ended with {code} at {taken:g}: {errors[-300:]}")
    return (taken / limit.most - 1) * 100


def _seconds_late(scene: Scene, problems: list[str]) -> float:
    """How many seconds after its hours a run had ended."""
    with _Slow(0.2) as endpoint:
        code, errors, spent = _run(scene, "hours", endpoint, 4, {"hours": _HOURS}, examples=2000)
        if code != _STOPPED:
            problems.append(f"hours: it ended with {code}: {errors[-300:]}")
    return spent - _HOURS * _ONE_HOUR


def _run(
    scene: Scene,
    place: str,
    endpoint: ChargingEndpoint,
    at_once: int,
    budget: Mapping[str, float],
    examples: int = 200,
) -> tuple[int, str, float]:
    """The exit code of an evaluation, its errors, and the seconds that it counts for itself."""
    folder = scene.folder / f"budget-{place}"
    folder.mkdir()
    config = charged_project(
        folder,
        endpoint.url,
        examples=examples,
        eval={
            "general": {"dataset": "train.jsonl", "max_concurrency": at_once},
            "evaluators": {"correct": "agent:correct"},
        },
        budget=dict(budget),
    )
    done = finished("evaluate", config, "--name", "x", folder=folder)
    return done.returncode, done.stderr, _hours_of(folder / "runs" / "x") * _ONE_HOUR


def _hours_of(run: Path) -> float:
    from etude.budget.bill import read_bill

    bill: dict[str, Any] = read_bill(run).as_json()
    return float(bill.get("hours", 0.0))
