"""How fast two demos learn, the calculator and tic-tac-toe: reward against time, over three seeds.

Runs `etude demo --json`, a process for each seed, and notes when each of its events comes. Time counts from
the start of the process, so it contains making the base model and all evaluations; CPU time is the
process's, with its threads.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from common import parse_arguments, print_json, print_table, progress, silent

from etude.core.stats import Estimate, estimate, shown_mean

CALCULATOR, TICTACTOE = "calculator", "tictactoe"
TARGETS = {CALCULATOR: 0.9, TICTACTOE: 0.6}
WINDOW = 4
"""Epochs whose rewards are averaged: one epoch's are too few to say that a target is reached."""
SHOWN = 12
"""Rows of the printed curve."""


@dataclass(frozen=True)
class Point:
    """The average reward of one epoch's episodes, sampled from the weights before it."""

    epoch: int
    seconds: float
    cpu_seconds: float | None
    """None where the system does not tell while the process runs."""
    reward: float


@dataclass(frozen=True)
class Learning:
    """One run of the demo."""

    seed: int
    before: Estimate
    """The reward on the held-out examples."""
    after: Estimate
    greedy: Estimate
    """After training, at temperature 0."""
    curve: list[Point]
    seconds: float
    cpu_seconds: float
    task: str = CALCULATOR

    @property
    def target(self) -> float:
        """The reward to be reached."""
        return TARGETS[self.task]

    @property
    def smooth_curve(self) -> list[Point]:
        """The curve with each reward the average of the last `WINDOW` epochs."""
        rewards = [point.reward for point in self.curve]
        windows = [rewards[max(0, place + 1 - WINDOW) : place + 1] for place in range(len(rewards))]
        return [
            replace(point, reward=statistics.fmean(window))
            for point, window in zip(self.curve, windows, strict=True)
        ]

    @property
    def target_point(self) -> Point | None:
        """Where the smoothed reward reached the target; None when it never did."""
        return next((point for point in self.smooth_curve[WINDOW - 1 :] if point.reward >= self.target), None)

    @property
    def seconds_to_target(self) -> float | None:
        """Wall seconds until then."""
        return None if self.target_point is None else self.target_point.seconds

    @property
    def cpu_seconds_to_target(self) -> float | None:
        """CPU seconds until then; None also where the system does not tell while the process runs."""
        return None if self.target_point is None else self.target_point.cpu_seconds


def learn(seed: int, task: str = CALCULATOR) -> Learning:
    """Run the demo with a seed. Raises SystemExit when it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        options = ["--task", task, "--seed", str(seed), "--out", folder]
        command = [sys.executable, "-m", "etude", "demo", "--json", *options]
        events = list(run(command, start))
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    curve = [
        Point(event["epoch"], event["at"], event["cpu"], event["metrics"]["avg_reward"])
        for event in events
        if event["event"] == "trained"
    ]
    told = next(event for event in events if event["event"] == "demo")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Learning(
        seed, *(read_reward(told[when]) for when in ("before", "after", "greedy")), curve, seconds, cpu, task
    )


def run(command: Sequence[str], start: float) -> Iterator[dict[str, Any]]:
    """The events that a command prints, each with when it came."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line) | {"at": time.perf_counter() - start, "cpu": read_cpu_seconds(process.pid)}
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}")


def read_cpu_seconds(pid: int) -> float | None:
    """CPU seconds that a process has taken so far."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_reward(evaluation: dict[str, Any]) -> Estimate:
    """The reward of an evaluation."""
    scores = evaluation["scores"][evaluation["reward"]]
    return Estimate(scores["mean"], scores["low"], scores["high"], scores["n"])


def as_json(runs: Sequence[Learning]) -> dict[str, Any]:
    """A task in what `--json` prints: the calculator's scores, medians of seconds, and each run."""
    times = ("before", "after", "greedy") if runs[0].task == CALCULATOR else ()
    scores = {when: asdict(pool([getattr(one, when) for one in runs])) for when in times}
    return scores | {
        "target": runs[0].target,
        "seconds": statistics.median(one.seconds for one in runs),
        "cpu_seconds": statistics.median(one.cpu_seconds for one in runs),
        "seconds_to_target": median([one.seconds_to_target for one in runs]),
        "cpu_seconds_to_target": median([one.cpu_seconds_to_target for one in runs]),
        "runs": [asdict(one) | {"seconds_to_target": one.seconds_to_target} for one in runs],
    }


def median(values: Sequence[float | None]) -> float | None:
    """The median; None when one of them is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


def pool(parts: Sequence[Estimate]) -> Estimate:
    """All seeds' episodes as one sample; an episode of the calculator is right or wrong."""
    return estimate([float(place < round(one.mean * one.n)) for one in parts for place in range(one.n)])


def print_results(runs: Sequence[Learning]) -> None:
    """A row for each seed of a task, and the curve of the first."""
    first = runs[0]
    print_table(
        f"The demo '{first.task}', {first.after.n} held-out episodes at temperature 1",
        ("seed", "before", "after", "greedy", f"s to {first.target}", "CPU s", "s in all", "CPU s"),
        [_seed_row(one) for one in runs],
        [],
    )
    points = first.smooth_curve
    last = len(points) - 1
    shown = sorted({round(last * step / (SHOWN - 1)) for step in range(SHOWN)})
    print_table(
        f"Learning curve of seed {first.seed}",
        ("epoch", "seconds", "CPU s", f"reward, average of {WINDOW} epochs"),
        [_row(points[place]) for place in shown],
        [],
    )


def _seed_row(one: Learning) -> tuple[str, ...]:
    return (
        str(one.seed),
        *(shown_mean(each.mean, each.low, each.high) for each in (one.before, one.after)),
        f"{one.greedy.mean:.3f}",
        _seconds(one.seconds_to_target),
        _seconds(one.cpu_seconds_to_target),
        _seconds(one.seconds),
        _seconds(one.cpu_seconds),
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _row(point: Point) -> tuple[str, str, str, str]:
    seconds = _seconds(point.seconds), _seconds(point.cpu_seconds)
    return str(point.epoch + 1), *seconds, f"{point.reward:.3f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the demos, and print tables or JSON."""
    flags = parse_arguments(str(__doc__), arguments)
    note = silent if flags.json else progress
    found: dict[str, list[Learning]] = {CALCULATOR: [], TICTACTOE: []}
    for task, runs in found.items():
        for seed in (0, 1, 2) if not flags.quick else (0,) if task == CALCULATOR else ():
            note(f"{task}, seed {seed}")
            runs.append(learn(seed, task))
    if flags.json:
        tasks = {task: as_json(runs) for task, runs in found.items() if runs}
        print_json({"tasks": tasks}, {"seeds": len(found[CALCULATOR])}, "95 %")
    else:
        for runs in filter(None, found.values()):
            print_results(runs)


if __name__ == "__main__":
    main()
