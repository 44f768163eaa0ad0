"""The `warm_up` block: transcripts that a model imitates before it is trained, and what ends that."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from etude.config.data_files import read_jsonl
from etude.config.import_path import import_object, is_import_path, where_raised
from etude.core.data_model import DataModel
from etude.core.errors import DatasetError, EtudeError
from etude.core.example import Example
from etude.core.message import Message, Tool
from etude.core.training_rows import SupervisedRow


class UntilConfig(DataModel, revalidate_instances="always"):
    """The measurement that ends a warm-up."""

    reward: float | None = None
    """The mean reward of the agent has risen to this, on training examples."""
    loss: float | None = None
    """The loss, in nats for each token that the assistant said, has fallen to this."""

    @model_validator(mode="after")
    def _names_one(self) -> UntilConfig:
        if (self.reward is None) == (self.loss is None):
            raise ValueError("set `reward` or `loss`, and not both")
        return self

    def is_reached(self, value: float) -> bool:
        """Whether a measurement is enough."""
        return value >= self.reward if self.reward is not None else value <= (self.loss or 0.0)

    def __str__(self) -> str:
        return f"reward {self.reward:g}" if self.reward is not None else f"loss {self.loss:g}"


class WarmUpConfig(DataModel, revalidate_instances="always"):
    """Imitate transcripts before training, until a measured value is reached or for a number of steps."""

    transcripts: str
    """A JSONL file with a conversation a line (`messages`, `tools`), or `module:function`. The function gets
    the training examples, and the run's seed where it has a parameter `seed`; it gives conversations."""
    until: UntilConfig | None = None
    """The measurement that ends it: `{reward: 0.3}` or `{loss: 0.5}`. How many steps that takes differs from
    seed to seed."""
    steps: int | None = Field(default=None, ge=1)
    """Optimiser steps, in place of `until`: one job."""
    learning_rate: float | None = Field(default=None, gt=0)
    """The same for all steps; left out: the adapter's, with its schedule."""
    batch_size: int = Field(default=32, ge=1)
    """Transcripts of an optimiser step."""
    min_steps: int = Field(default=0, ge=0)
    """Steps before which nothing is measured."""
    check_every: int = Field(default=20, ge=1)
    """Steps from one measurement to the next; each stretch is a job, and makes a version."""
    max_steps: int = Field(default=5000, ge=1)
    """Steps after which `until` counts as out of reach."""
    examples: int = Field(default=256, ge=2)
    """Training examples that the reward is measured on: the first ones."""

    @model_validator(mode="after")
    def _is_ended_by_one(self) -> WarmUpConfig:
        if (self.until is None) == (self.steps is None):
            raise ValueError("set `until` or `steps`, and not both: the one thing that ends the warm-up")
        return self

    def next_steps(self, done: int) -> int:
        """Optimiser steps of the next job, after `done`; 0 when there are no more."""
        if self.steps is not None:
            return self.steps - done
        wanted = self.check_every if done else max(self.min_steps, self.check_every)
        return min(wanted, self.max_steps - done)


@dataclass(frozen=True, slots=True)
class Transcript:
    """A finished conversation to imitate."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    where: str = ""
    """The place that it was read from: `file:line`."""


def read_transcripts(source: str, examples: Sequence[Example], seed: int) -> list[Transcript]:
    """The conversations of a file or a function. Raises DatasetError with the line or number of a bad one."""
    if is_import_path(source):
        transcripts = [
            _transcript(f"{source}: transcript {n}", row) for n, row in _made(source, examples, seed)
        ]
    else:
        transcripts = [_transcript(where, row) for where, row in read_jsonl(Path(source))]
    if not transcripts:
        raise DatasetError(f"{source}: there are no transcripts to imitate")
    return transcripts


def _made(source: str, examples: Sequence[Example], seed: int) -> Iterator[tuple[int, Any]]:
    function = import_object(source)
    try:
        parameters = [*inspect.signature(function).parameters.values()]
        wanted: dict[str, Any] = {"seed": seed} if any(each.name == "seed" for each in parameters) else {}
        given = [list(examples)] if any(each.name != "seed" for each in parameters) else []
        rows = function(*given, **wanted)
        if isinstance(rows, Mapping | str) or not isinstance(rows, Iterable):
            raise DatasetError(f"{source} must give an iterable of conversations, found {rows!r:.80}")
        yield from enumerate(rows, start=1)
    except EtudeError:
        raise
    except Exception as error:  # the user's function
        raise DatasetError(f"{source} failed: {where_raised(error)}") from error


def _transcript(where: str, row: Any) -> Transcript:
    """The conversation of a row: its messages alone, or an object with `messages` and `tools`."""
    content = {"messages": row} if isinstance(row, list | tuple) else row
    try:
        checked = SupervisedRow.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        at = ".".join(map(str, first["loc"]))
        raise DatasetError(
            f"{where}: {f'{at}: ' if at else ''}{first['msg'].removeprefix('Value error, ')}"
        ) from error
    return Transcript([message.to_wire() for message in checked.messages], checked.tools or (), where)
