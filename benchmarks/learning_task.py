"""The training that learning.py compares: base model, prompts, settings, clock, and how rewards are measured.

Both sides have all of it from here.
"""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import etude
from etude.algorithms.epochs import examples_for_epoch
from etude.config.import_path import import_object, make_importable
from etude.config.load import load_config
from etude.config.schema import Config
from etude.core.example import Example
from etude.demo.demo import copy_example
from etude.models.tiny import TinyShape

TENTHS = 10


@dataclass(frozen=True)
class Size:
    """A base model, and what it is trained with: rates were chosen on seed 7, which is not reported."""

    shape: TinyShape
    warm_up_rate: float
    """At which it imitates, before the training that is compared."""
    learning_rate: float
    """Of that training, by both sides."""
    steps: int
    """Of the training, unless others are asked for."""


SIZES = {
    "0.13M": Size(TinyShape(), 3e-3, 5e-4, steps=100),
    "4M": Size(TinyShape(256, 5, 4, 768, initializer_range=0.02), 1e-3, 3e-4, steps=50),
    "26M": Size(TinyShape(512, 8, 8, 1408, initializer_range=0.02), 5e-4, 5e-5, steps=30),
}
"""By their parameters. All are Llamas with one kind of tokenizer, warmed up to the same reward."""
SMALL = "0.13M"
"""The demos'."""
_OVERRIDES = (
    "llms.sorter.dtype=float32",
    # TRL divides by the tokens of groups without an advantage too.
    "trajectory_builders.grpo.drop_flat_groups=false",
    "finetuning.run_configuration.validation_dataset=null",
)


@dataclass(frozen=True)
class Course:
    """A training on the example `sort`, in a folder with the example's files, its data and the base model."""

    folder: Path
    seed: int
    steps: int
    size: str = SMALL

    @property
    def file(self) -> str:
        """The config's."""
        return str(self.folder / "config.yml")

    @property
    def overrides(self) -> list[str]:
        """Of the config."""
        own = [
            f"finetuning.seed={self.seed}",
            f"finetuning.num_epochs={self.steps}",
            f"trainer_adapters.local.learning_rate={SIZES[self.size].learning_rate}",
        ]
        return [*_OVERRIDES, *own, f"finetuning.output_dir={json.dumps(str(self.folder / 'runs'))}"]

    @cached_property
    def config(self) -> Config:
        """The settings of both sides."""
        return load_config(self.file, self.overrides)

    @property
    def builder(self) -> Any:
        """The options of GRPO."""
        return self.config.trajectory_builders["grpo"]

    @property
    def base(self) -> Path:
        """The folder of the base model."""
        return self.folder / "base" / "model"

    @property
    def episodes_per_step(self) -> int:
        """Of all groups together."""
        return int(self.builder.num_generations * self.builder.examples_per_epoch)

    @property
    def ends(self) -> list[int]:
        """The steps, counted from 1, after which a tenth is over."""
        return [self.steps * tenth // TENTHS for tenth in range(1, TENTHS + 1)]

    def prompts(self) -> list[Example]:
        """The examples of all steps, in the order in which Etude plays them."""
        data = map(
            json.loads, (self.folder / "base" / "train.jsonl").read_text(encoding="utf-8").splitlines()
        )
        examples = [Example(row["id"], {"letters": row["letters"]}, row["answer"]) for row in data]
        count = self.builder.examples_per_epoch
        chosen = (examples_for_epoch(examples, count, step, self.seed) for step in range(self.steps))
        return [example for step in chosen for example in step]

    def prepare(self) -> None:
        """Make data and base model as the demo does, in its size, unless they are there."""
        if self.base.is_dir():
            return
        copy_example("sort", self.folder)
        make_importable(self.folder)
        build: Callable[..., Any] = import_object("base:build_base")
        size = SIZES[self.size]
        own = {"shape": size.shape, "learning_rate": size.warm_up_rate}
        asyncio.run(build(self.folder / "base", self.seed, lambda what, value: None, **own))

    def rewards(self, model: Path) -> list[float]:
        """The reward of one answer to each held-out example at temperature 1, by the model in a folder.

        Raises SystemExit when one has none. The same seed goes with the same example on both sides.
        """
        held_out = json.dumps(str(self.folder / "base" / "validation.jsonl"))
        changes = [*self.overrides, f"eval.general.dataset={held_out}"]
        run = etude.evaluate(self.file, model=str(model), overrides=changes, progress=False)
        rows = map(json.loads, (run.folder / "items.jsonl").read_text(encoding="utf-8").splitlines())
        scores = {row["id"]: row["scores"].get("in_place") for row in rows}
        if missing := [name for name, score in scores.items() if score is None]:
            raise SystemExit(f"{run.folder}: {missing[0]} and {len(missing) - 1} others have no reward")
        return [scores[name] for name in sorted(scores)]


@dataclass(frozen=True)
class Time:
    """Seconds since a process began."""

    cpu_seconds: float
    """Of the process and of those that it waited for."""
    wall_seconds: float

    def since(self, other: Time) -> Time:
        """The seconds from another time to this one."""
        return Time(self.cpu_seconds - other.cpu_seconds, self.wall_seconds - other.wall_seconds)


@dataclass
class Clock:
    """The time at the first step, and at the end of each tenth."""

    course: Course
    began: float
    """When the process was started, in Unix seconds."""
    first: Time | None = None
    ends: list[Time] = field(default_factory=list)
    _left_out: Time = Time(0.0, 0.0)

    def now(self) -> Time:
        """Without what was left out."""
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = time.process_time() + children.ru_utime + children.ru_stime
        return Time(cpu, time.time() - self.began).since(self._left_out)

    def before(self, step: int) -> None:
        """A step begins; they are counted from 1."""
        if step == 1:
            self.first = self.now()

    def after(self, step: int) -> bool:
        """A step is over; whether a tenth is."""
        is_end = step in self.course.ends
        if is_end:
            self.ends.append(self.now())
        return is_end

    def leave_out(self, work: Callable[[], None]) -> None:
        """Do what is no part of the training."""
        before = self.now()
        work()
        spent = self.now().since(before)
        total = self._left_out
        self._left_out = Time(total.cpu_seconds + spent.cpu_seconds, total.wall_seconds + spent.wall_seconds)

    def as_json(self) -> dict[str, Any]:
        """The time at the first step, and the points with their episodes, the first of which is before it."""
        assert self.first is not None
        assert len(self.ends) == TENTHS
        each = self.course.episodes_per_step
        times = zip((0, *self.course.ends), (self.first, *self.ends), strict=True)
        points = [{"episodes": step * each, **asdict(at.since(self.first))} for step, at in times]
        return {"start": asdict(self.first), "points": points}
