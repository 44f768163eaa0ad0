"""Whether a real model learns tasks that nobody made for it, and how soon beside TRL: three seeds.

Each task (learning_task.py) is trained by `etude.train` with GRPO and LoRA weights, and measured before and
after on held-out examples at temperature 1. With `--trl` one of them, `unaided_reversal`, is trained by TRL
too. Each training has a process of its own, one after the other.

Equal on both sides, read from one config: base model and its dtype, LoRA weights (rank, alpha, layers), one
thread, the prompts of every step in their order with the same token ids, episodes per step, temperature,
limit of tokens, stop tokens, AdamW (rate, betas, decay, no schedule), clipping of the gradient, one
optimiser step on all episodes of a step, the clipped loss (0.2 and 0.28) as a mean over all tokens of a
step, no KL, and the held-out examples: the model is measured at each fifth of the episodes, TRL's by Etude
after the training.

Not equal: the random numbers; TRL divides an advantage by the group's sample deviation (n - 1) plus 1e-4,
and Etude by the group's own (n), which makes TRL's advantages 6 % smaller, AdamW takes nearly
the same step from them; Etude weighs a token by the learner's probability over the engine's, at most 2,
and TRL takes both for equal. After a step on groups that are all without an advantage TRL's AdamW moves
by its momentum, and Etude takes no such step. Etude records every call, score and version on the disk as
in any run, and could go on after a kill; TRL logs nothing, and what it saves for this comparison is not
timed. TRL samples by `generate` and trains without checkpointing, dropout or evaluation, on 4 rows at a
time.

Differences over examples say which of two trained models is better. Two trainings of one method may differ by
more than that, so the difference over seeds, each a training, stands beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import print_json, print_table, progress, silent, versions
from learning_task import REVERSAL, TASKS, UNAIDED, Clock, Course, train_imitator

import etude
from etude.core.interfaces import Progress
from etude.core.stats import Estimate, estimate, estimate_difference, t95
from etude.models.source import PACKAGED

ETUDE, TRL = SIDES = ("etude", "trl")
IMITATOR = "imitator"
WAY = 0.9
"""The target is so much of the way from the reward before training to the better side's at its end."""


@dataclass(frozen=True)
class Point:
    """The model after so many episodes; seconds are from the beginning of the first step."""

    episodes: int
    cpu_seconds: float
    wall_seconds: float
    rewards: list[float]
    """On each held-out example."""

    @property
    def reward(self) -> float:
        """Their mean."""
        return statistics.fmean(self.rewards)


@dataclass(frozen=True)
class Series:
    """One training by one side."""

    seed: int
    side: str
    points: list[Point]

    def seconds_to(self, reward: float, clock: str) -> float | None:
        """Seconds until a held-out reward, on the line between points; None where it was never reached."""
        for last, point in zip(self.points, self.points[1:], strict=False):
            if point.reward >= reward:
                part = max(0.0, (reward - last.reward) / (point.reward - last.reward))
                begin = float(getattr(last, clock))
                return begin + part * (float(getattr(point, clock)) - begin)
        return None

    def as_json(self) -> dict[str, Any]:
        """Its points, with their intervals."""
        points = [{**asdict(point), "rewards": asdict(estimate(point.rewards))} for point in self.points]
        return {"seed": self.seed, "points": points}


@dataclass(frozen=True)
class Pair:
    """Both sides of one seed."""

    etude: Series
    trl: Series

    @property
    def target(self) -> float:
        """The held-out reward that both are timed to."""
        before = self.trl.points[0].reward
        return before + WAY * (max(side.points[-1].reward for side in (self.etude, self.trl)) - before)

    def times_sooner(self, clock: str) -> float | None:
        """TRL's seconds to the target over Etude's; None where one of them never reached it."""
        theirs, own = (side.seconds_to(self.target, clock) for side in (self.trl, self.etude))
        return None if theirs is None or own is None else theirs / own


class Ends(Progress):
    """Notes when a part ends. An epoch is a step, and what is measured in between is not timed."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def epoch_started(self, epoch: int, num_epochs: int) -> None:
        """An epoch begins."""
        self.clock.before(epoch)

    def trained(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """There is a new version."""
        self.clock.after(epoch)

    def skipped(self, epoch: int, reason: str) -> None:
        """There is none."""
        self.clock.after(epoch)

    def phase(self, name: str, total: int | None = None) -> None:
        """A validation begins, or something else."""
        if name == "validating":
            self.clock.pause()

    def validated(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """It is over."""
        self.clock.go_on()


def measure(side: str, course: Course, file: Path, began: float) -> None:
    """Train by one side in this process, measure the models of all parts, and write the file."""
    clock = Clock(course, began)
    with tempfile.TemporaryDirectory() as folder:
        here = replace(course, folder=Path(folder))
        clock.course = here
        if side == ETUDE:
            run = etude.train(here.data, name="run", progress=Ends(clock))
            phases = [f"validation/{step}" for step in (0, *here.ends)]
            rewards = [here.rewards(run.folder, phase) for phase in phases]
        else:
            from learning_trl import train

            rewards = train(here, clock)
        points = [{**at, "rewards": found} for at, found in zip(clock.points(), rewards, strict=True)]
    found = {
        "asked": asdict(course) | {"folder": None},
        "side": side,
        "points": points,
        "versions": versions(),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(found), encoding="utf-8")
    draft.replace(file)


def load_series(side: str, course: Course, note: Callable[[str], None]) -> Series:
    """A training that is in its file, or is done now. Raises SystemExit for a file of another training."""
    file = course.folder / f"{course.task}-{course.seed}-{side}.json"
    if not file.is_file():
        note(f"{course.task}, seed {course.seed}, {side}")
        train_apart(side, course)
    found = json.loads(file.read_text(encoding="utf-8"))
    if found["asked"] != asdict(course) | {"folder": None}:
        raise SystemExit(f"{file} is of another training: remove it, or name another folder with --out")
    return Series(course.seed, side, [Point(**point) for point in found["points"]])


def train_apart(side: str, course: Course) -> None:
    """Train in another process, with one thread. Raises SystemExit when that fails."""
    given = ["--side", side, "--tasks", course.task, "--seeds", str(course.seed)]
    given += ["--steps", str(course.steps), "--model", course.model, "--dtype", course.dtype]
    given += ["--out", str(course.folder)]
    command = [sys.executable, __file__, *given, "--began", str(time.time())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=sys.stderr, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{course.task}, seed {course.seed}, {side} ended with exit code {done.returncode}")


def rewards_at(all_series: Sequence[Series], part: int) -> list[float]:
    """The rewards at the end of a part, of all seeds, example by example."""
    return [reward for series in all_series for reward in series.points[part].rewards]


def rewards_of_sides(pairs: Sequence[Pair], part: int) -> tuple[list[float], list[float]]:
    """The same of Etude and of TRL."""
    return rewards_at([pair.etude for pair in pairs], part), rewards_at([pair.trl for pair in pairs], part)


def ahead(pairs: Sequence[Pair], part: int) -> Estimate:
    """By how much Etude's reward is higher at the end of a part, over the held-out examples of all seeds."""
    own, theirs = rewards_of_sides(pairs, part)
    return estimate_difference(theirs, own)


def over_seeds(pairs: Sequence[Pair], part: int) -> dict[str, Any]:
    """The same over trainings: each seed's difference, and Student's interval of their mean."""
    values = [pair.etude.points[part].reward - pair.trl.points[part].reward for pair in pairs]
    mean, n = statistics.fmean(values), len(values)
    half = t95(n - 1) * statistics.stdev(values) / n**0.5 if n > 1 else None
    bounds = [None, None] if half is None else [mean - half, mean + half]
    return {"mean": mean, "low": bounds[0], "high": bounds[1], "n": n, "values": values}


def summary(values: Sequence[float | None]) -> dict[str, Any]:
    """The median and the range of a figure over the seeds; null where one has none."""
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return {"median": None, "low": None, "high": None, "n": len(values), "by_seed": list(values)}
    return {
        "median": statistics.median(known),
        "low": min(known),
        "high": max(known),
        "n": len(known),
        "by_seed": known,
    }


def task_as_json(all_series: Sequence[Series]) -> dict[str, Any]:
    """A task's rewards before and after, over all seeds and for each."""
    before, after = rewards_at(all_series, 0), rewards_at(all_series, -1)
    return {
        "before": asdict(estimate(before)),
        "after": asdict(estimate(after)),
        "difference": asdict(estimate_difference(before, after)),
        "seeds": [series.as_json() for series in all_series],
    }


def beside_trl(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Both sides at each part, and how much sooner Etude gets there."""
    parts = [
        {
            "part": part,
            "episodes": pairs[0].etude.points[part].episodes,
            "etude": asdict(estimate(rewards_of_sides(pairs, part)[0])),
            "trl": asdict(estimate(rewards_of_sides(pairs, part)[1])),
            "difference": asdict(ahead(pairs, part)),
            "difference_over_seeds": over_seeds(pairs, part),
        }
        for part in range(len(pairs[0].etude.points))
    ]
    return {
        "not_worse_at_any_part": all(row["difference"]["high"] >= 0 for row in parts),
        "not_worse_over_seeds": None
        if len(pairs) == 1
        else all(row["difference_over_seeds"]["high"] >= 0 for row in parts),
        "times_sooner_to_target": summary([pair.times_sooner("cpu_seconds") for pair in pairs]),
        "times_sooner_in_wall_time": summary([pair.times_sooner("wall_seconds") for pair in pairs]),
        "targets": [pair.target for pair in pairs],
        "parts": parts,
        "seeds": [
            {
                ETUDE: pair.etude.as_json(),
                TRL: pair.trl.as_json(),
                "times_sooner": pair.times_sooner("cpu_seconds"),
            }
            for pair in pairs
        ],
    }


def print_tasks(tasks: Mapping[str, Sequence[Series]]) -> None:
    """A row for each training."""
    rows = [
        [
            *(name, str(series.seed)),
            *(str(estimate(series.points[at].rewards)) for at in (0, -1)),
            *(f"{getattr(series.points[-1], clock):.0f}" for clock in ("cpu_seconds", "wall_seconds")),
        ]
        for name, all_series in tasks.items()
        for series in all_series
    ]
    columns = ("task", "seed", "before", "after", "CPU s", "wall s")
    print_table("Held-out reward", columns, rows, [])


def print_beside_trl(pairs: Sequence[Pair]) -> None:
    """A row for each part, over all seeds; then one for each seed."""
    rows = []
    for part in range(len(pairs[0].etude.points)):
        seconds = [
            statistics.median(getattr(getattr(pair, side).points[part], clock) for pair in pairs)
            for clock in ("cpu_seconds", "wall_seconds")
            for side in SIDES
        ]
        own, theirs = map(estimate, rewards_of_sides(pairs, part))
        marks = (_show_estimate(own), _show_estimate(theirs), _show_estimate(ahead(pairs, part), "+"))
        rows.append([f"{pairs[0].etude.points[part].episodes}", *marks, *(f"{one:.1f}" for one in seconds)])
    columns = ("episodes", "Etude", "TRL", "difference", "CPU s: Etude", "TRL", "wall s: Etude", "TRL")
    print_table(f"Beside TRL: {len(pairs)} seeds of {len(pairs[0].trl.points[0].rewards)}", columns, rows, [])
    rows = [
        [
            *(str(pair.etude.seed), f"{pair.target:.3f}"),
            *(_seconds(getattr(pair, side).seconds_to(pair.target, "cpu_seconds")) for side in SIDES),
            *(_seconds(pair.times_sooner(clock)) for clock in ("cpu_seconds", "wall_seconds")),
        ]
        for pair in pairs
    ]
    columns = ("seed", "target", "CPU s: Etude", "TRL", "times sooner", "wall")
    print_table(f"Seconds to {WAY:.0%} of the way", columns, rows, [])


def _show_estimate(value: Estimate, sign: str = "") -> str:
    return f"{value.mean:{sign}.3f} ±{(value.high - value.low) / 2:.3f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and print tables or JSON."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"{REVERSAL} alone, one seed")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, help="all by default")
    parser.add_argument("--seeds", type=int, nargs="+", help="0, 1 and 2 by default")
    parser.add_argument("--trl", action="store_true", help=f"train {UNAIDED} by TRL too")
    parser.add_argument("--model", default=PACKAGED, help=f"{PACKAGED} by default")
    parser.add_argument("--dtype", default="auto", help="of the policy; Etude's choice by default")
    parser.add_argument("--steps", type=int, help="optimiser steps; the task's by default")
    parser.add_argument("--out", type=Path, help="keep what is measured here, and go on with what is there")
    parser.add_argument("--side", choices=(*SIDES, IMITATOR), help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, default=time.time(), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    names = given.tasks or ([REVERSAL] if given.quick else [*TASKS])
    seeds = given.seeds or ([0] if given.quick else [0, 1, 2])
    for name in [*names]:
        if not find_spec(package := TASKS[name].needs):
            print(f"{name} is skipped: pip install {package}", file=sys.stderr)
            names.remove(name)
        elif given.steps and given.steps % TASKS[name].parts:
            raise SystemExit(f"--steps: {name} is measured {TASKS[name].parts} times, so give a multiple")
    with tempfile.TemporaryDirectory() as folder:
        out = (given.out or Path(folder)).resolve()
        courses = {
            name: [
                Course(out, name, seed, given.steps or TASKS[name].steps, given.model, given.dtype)
                for seed in seeds
            ]
            for name in names
        }
        if given.side:
            ((course,),) = courses.values()
            if given.side == IMITATOR:
                train_imitator(course)
                return
            measure(given.side, course, out / f"{course.task}-{course.seed}-{given.side}.json", given.began)
            return
        note = silent if given.json else progress
        for course in courses.get(UNAIDED, [])[:1]:
            if not course.imitator.is_dir():
                note(f"{UNAIDED}: the weights to begin with")
                train_apart(IMITATOR, replace(course, seed=0))
            courses[UNAIDED] = [replace(one, model=str(course.imitator)) for one in courses[UNAIDED]]
        tasks = {name: [load_series(ETUDE, one, note) for one in own] for name, own in courses.items()}
        theirs = courses.get(UNAIDED, []) if given.trl else []
        pairs = [
            Pair(own, load_series(TRL, one, note))
            for own, one in zip(tasks.get(UNAIDED, []), theirs, strict=False)
        ]
    if given.json:
        found = {"model": given.model, "tasks": {name: task_as_json(own) for name, own in tasks.items()}}
        found["beside_trl"] = beside_trl(pairs) if pairs else None
        print_json(found, {"seeds": len(seeds)}, "95 %")
        return
    print_tasks(tasks)
    if pairs:
        print_beside_trl(pairs)


if __name__ == "__main__":
    main()
