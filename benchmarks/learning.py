"""How soon a model learns, by Etude and by TRL: reward against episodes and CPU time, over three seeds.

The task is the example `sort`: one question, one answer, GRPO with groups of 16 on 8 prompts a step, on the
demos' model or a larger one of its kind (`--size`). Each side trains in a process of its own, one after the
other.

Equal on both sides, read from one config: base model (one file for both, warmed up as the demo's), float32,
one thread, the prompts of every step in their order with the same token ids, episodes per step, temperature,
limit of tokens, stop token, AdamW (rate, betas, decay, no schedule), clipping of the gradient, one optimiser
step on all episodes of a step, the clipped loss (0.2 and 0.28) as a mean over all tokens of a step, no KL,
and the held-out examples: models are written at each tenth of the episodes, and after the training one
program of Etude's measures them all, at temperature 1, with the same random numbers for the same example.

Not equal: the random numbers of training; TRL divides an advantage by the group's sample deviation (n - 1)
plus 1e-4, and Etude by that of the group itself (n), which makes TRL's advantages 3 % smaller, AdamW takes
nearly the same step from them; TRL's ratio is exactly 1, and Etude's is that of the learner's logprobs to the
engine's. After a step on groups that are all without an advantage TRL's AdamW moves by its momentum, and
Etude takes no such step. Etude records every call, score and version on the disk as in any run, and could go
on after a kill; TRL saves and logs nothing. TRL samples by `generate` and trains without checkpointing,
dropout or evaluation, with the rows at a time that were fastest. Writing models for this comparison is not
timed.

Differences over examples say which of two trained models is better. Two trainings of one method may differ by
more than that, so the difference over seeds, each a training, stands beside it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import print_json, print_table, progress, silent
from learning_task import SIZES, SMALL, TENTHS, Clock, Course

from etude.core.stats import Estimate, estimate, estimate_difference, t95

ETUDE, TRL = SIDES = ("etude", "trl")
QUICK_STEPS = 20
WAY = 0.9
"""The target is so much of the way from the reward before training to the better side's at its end."""
GOAL = 3.0


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
    start: dict[str, float]
    """`cpu_seconds` and `wall_seconds` before the first step: imports, the model, the trainer."""

    def seconds_to(self, reward: float, clock: str) -> float | None:
        """Seconds until a held-out reward, on the line between points; None where it was never reached."""
        for last, point in zip(self.points, self.points[1:], strict=False):
            if point.reward >= reward:
                part = max(0.0, (reward - last.reward) / (point.reward - last.reward))
                begin = float(getattr(last, clock))
                return begin + part * (float(getattr(point, clock)) - begin)
        return None


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

    def times_sooner(self, clock: str, *, with_start: bool = False) -> float | None:
        """TRL's seconds to the target over Etude's; None where one of them never reached it."""
        seconds = []
        for side in (self.trl, self.etude):
            taken = side.seconds_to(self.target, clock)
            if taken is None:
                return None
            seconds.append(taken + (side.start[clock] if with_start else 0.0))
        return seconds[0] / seconds[1]


def measure_side(side: str, course: Course, file: Path, began: float) -> None:
    """Train by one side in this process, measure the models of all tenths, and write the file."""
    clock = Clock(course, began)
    with tempfile.TemporaryDirectory() as folder:
        importlib.import_module(f"learning_{side}").train(course, clock, Path(folder))
        found = clock.as_json()
        models = [course.base, *(Path(folder) / str(tenth) for tenth in range(1, TENTHS + 1))]
        for point, model in zip(found["points"], models, strict=True):
            point["rewards"] = course.rewards(model)
    asked = {"seed": course.seed, "side": side, "size": course.size, "steps": course.steps}
    found = {**asked, **found, "versions": versions()}
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(found), encoding="utf-8")
    draft.replace(file)


def read_side(file: Path, course: Course) -> Series:
    """A series that was measured before. Raises SystemExit for one that is another."""
    found = json.loads(file.read_text(encoding="utf-8"))
    there, asked = (found["size"], found["steps"]), (course.size, course.steps)
    if there != asked:
        raise SystemExit(
            f"{file} is of {there[1]} steps of the model {there[0]}, and {asked[1]} of {asked[0]} are to be "
            "measured: remove it, or name another folder with --out"
        )
    points = [Point(**point) for point in found["points"]]
    return Series(found["seed"], found["side"], points, found["start"])


def pair_of(course: Course, note: Callable[[str], None]) -> Pair:
    """Both sides of a seed, each measured unless its file is there. They begin in turns."""
    seed = course.seed
    note(f"seed {seed}, base model")
    course.prepare()
    found = {}
    for side in SIDES if seed % 2 == 0 else SIDES[::-1]:
        file = course.folder / f"{side}.json"
        if not file.is_file():
            note(f"seed {seed}, {side}")
            given = [
                "--side",
                side,
                "--size",
                course.size,
                "--seeds",
                str(seed),
                "--steps",
                str(course.steps),
            ]
            given += ["--out", str(course.folder.parent)]
            command = [sys.executable, __file__, *given, "--began", str(time.time())]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, stdout=sys.stderr, check=False, env=environment)
            if done.returncode:
                raise SystemExit(f"{side} with seed {seed} ended with exit code {done.returncode}")
        found[side] = read_side(file, course)
    return Pair(found[ETUDE], found[TRL])


def versions() -> dict[str, str]:
    """Of what is compared."""
    return {name: version(name) for name in ("torch", "transformers", "trl")}


def rewards_at(pairs: Sequence[Pair], tenth: int) -> tuple[list[float], list[float]]:
    """Etude's and TRL's rewards at the end of a tenth, of all seeds, example by example."""
    return (
        [reward for pair in pairs for reward in pair.etude.points[tenth].rewards],
        [reward for pair in pairs for reward in pair.trl.points[tenth].rewards],
    )


def ahead(pairs: Sequence[Pair], tenth: int) -> Estimate:
    """By how much Etude's reward is higher at the end of a tenth, over the held-out examples of all seeds."""
    own, theirs = rewards_at(pairs, tenth)
    return estimate_difference(theirs, own)


def over_seeds(pairs: Sequence[Pair], tenth: int) -> dict[str, Any]:
    """The same over trainings: each seed's difference, and Student's interval of their mean."""
    values = [pair.etude.points[tenth].reward - pair.trl.points[tenth].reward for pair in pairs]
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


def as_json(pairs: Sequence[Pair]) -> dict[str, Any]:
    """The object that `--json` prints."""
    tenths = [
        {
            "tenth": tenth,
            "episodes": pairs[0].etude.points[tenth].episodes,
            "etude": asdict(estimate(rewards_at(pairs, tenth)[0])),
            "trl": asdict(estimate(rewards_at(pairs, tenth)[1])),
            "difference": asdict(ahead(pairs, tenth)),
            "difference_over_seeds": over_seeds(pairs, tenth),
        }
        for tenth in range(TENTHS + 1)
    ]
    return {
        "not_worse_at_any_tenth": all(row["difference"]["high"] >= 0 for row in tenths),
        "not_worse_over_seeds": None
        if len(pairs) == 1
        else all(row["difference_over_seeds"]["high"] >= 0 for row in tenths),
        "times_sooner_to_target": summary([pair.times_sooner("cpu_seconds") for pair in pairs]),
        "times_sooner_in_wall_time": summary([pair.times_sooner("wall_seconds") for pair in pairs]),
        "times_sooner_with_start": summary(
            [pair.times_sooner("cpu_seconds", with_start=True) for pair in pairs]
        ),
        "goal": GOAL,
        "tenths": tenths,
        "seeds": [seed_as_json(pair) for pair in pairs],
        "versions": versions(),
    }


def seed_as_json(pair: Pair) -> dict[str, Any]:
    """One seed: its target, and of both sides the seconds and the rewards at each tenth."""
    sides = {
        series.side: {
            "start": series.start,
            "cpu_seconds_to_target": series.seconds_to(pair.target, "cpu_seconds"),
            "wall_seconds_to_target": series.seconds_to(pair.target, "wall_seconds"),
            "points": [
                {
                    "episodes": point.episodes,
                    "cpu_seconds": point.cpu_seconds,
                    "wall_seconds": point.wall_seconds,
                    "reward": asdict(estimate(point.rewards)),
                }
                for point in series.points
            ],
        }
        for series in (pair.etude, pair.trl)
    }
    return {"seed": pair.etude.seed, "target": pair.target, **sides}


def print_results(pairs: Sequence[Pair]) -> None:
    """A row for each tenth, over all seeds; then one for each seed."""
    rows = []
    for tenth in range(TENTHS + 1):
        own, theirs = rewards_at(pairs, tenth)
        seconds = [
            statistics.median(getattr(getattr(pair, side).points[tenth], clock) for pair in pairs)
            for clock in ("cpu_seconds", "wall_seconds")
            for side in SIDES
        ]
        marks = (_shown(estimate(own)), _shown(estimate(theirs)), _shown(ahead(pairs, tenth), "+"))
        rows.append([f"{pairs[0].etude.points[tenth].episodes}", *marks, *(f"{one:.1f}" for one in seconds)])
    columns = ("episodes", "Etude", "TRL", "difference", "CPU s: Etude", "TRL", "wall s: Etude", "TRL")
    print_table(
        f"Held-out reward, {len(pairs)} seeds of {len(pairs[0].trl.points[0].rewards)}", columns, rows, []
    )
    rows = [
        [
            *(str(pair.etude.seed), f"{pair.target:.3f}"),
            *(_seconds(getattr(pair, side).seconds_to(pair.target, "cpu_seconds")) for side in SIDES),
            *(_seconds(pair.times_sooner(clock)) for clock in ("cpu_seconds", "wall_seconds")),
            _seconds(pair.times_sooner("cpu_seconds", with_start=True)),
            *(_seconds(getattr(pair, side).start["cpu_seconds"]) for side in SIDES),
        ]
        for pair in pairs
    ]
    print_table(
        f"Seconds to {WAY:.0%} of the way",
        (
            "seed",
            "target",
            "CPU s: Etude",
            "TRL",
            "times sooner",
            "wall",
            "with start",
            "start: Etude",
            "TRL",
        ),
        rows,
        [
            f"the goal is {GOAL:g} times sooner in CPU time",
            ", ".join(f"{name} {number}" for name, number in versions().items()),
        ],
    )


def _shown(value: Estimate, sign: str = "") -> str:
    return f"{value.mean:{sign}.3f} ±{(value.high - value.low) / 2:.3f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train by both sides, and print tables or JSON."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"one seed, and {QUICK_STEPS} steps")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--seeds", type=int, nargs="+", help="0, 1 and 2 by default")
    parser.add_argument("--size", choices=SIZES, default=SMALL, help="parameters of the model")
    parser.add_argument("--steps", type=int, help="optimiser steps; 10 at least, and the size's by default")
    parser.add_argument("--out", type=Path, help="keep what is measured here, and go on with what is there")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, default=time.time(), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    steps = given.steps or (QUICK_STEPS if given.quick else SIZES[given.size].steps)
    seeds = given.seeds or ([0] if given.quick else [0, 1, 2])
    with tempfile.TemporaryDirectory() as folder:
        out = (given.out or Path(folder)).resolve()
        courses = [Course(out / f"seed-{seed}", seed, steps, given.size) for seed in seeds]
        if given.side:
            (course,) = courses
            measure_side(given.side, course, course.folder / f"{given.side}.json", given.began)
            return
        pairs = [pair_of(course, silent if given.json else progress) for course in courses]
    if given.json:
        print_json({"size": given.size, **as_json(pairs)})
    else:
        print_results(pairs)


if __name__ == "__main__":
    main()
