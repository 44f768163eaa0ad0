"""The tasks of an environment as examples."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Literal

from etude.config.import_path import where_raised
from etude.core.errors import DatasetError, RequestError
from etude.core.example import Example

Split = Literal["train", "validation", "all"]

ENDLESS = 256
"""Tasks for training of a taskset without an end, where the config says no number."""

HELD_OUT = 64
"""Tasks that are held out at most, where the config says no number: a quarter, if that is less."""

_ANSWER = "answer"


class Tasks:
    """The tasks of a taskset, each known by its key."""

    def __init__(self, taskset: Any, by_key: dict[str, Any] | None = None) -> None:
        """`by_key` is where tasks are noted, for tasksets that share it."""
        self._taskset = taskset
        self._by_key: dict[str, Any] = {} if by_key is None else by_key

    def with_options(self, options: Mapping[str, Any]) -> Tasks:
        """The tasks of the same taskset with other options. Raises RequestError for wrong ones."""
        import verifiers.v1 as vf

        config = self._taskset.config
        try:
            changed = type(config).model_validate({**config.model_dump(), **options})
            return Tasks(vf.load_taskset(changed), self._by_key)
        except Exception as error:
            raise RequestError(f"{self._name}: taskset: {where_raised(error)}") from error

    def examples(self, split: Split, size: int | None, held_out: int | None, seed: int) -> list[Example]:
        """Those of a split, by key. Training and validation never share one.

        The tasks are shuffled with `seed`, the first `held_out` are for validation and the next `size` for
        training; `all` takes them as they come. Of tasks without an end only as many are made as are asked
        for. Raises DatasetError when they cannot be made, when there are none, or when two have one key.
        """
        if self._taskset.bounded:
            tasks = self._read(self._taskset)
        else:
            tasks = self._read(islice(self._taskset, (size or ENDLESS) + _held_out(held_out, 4 * HELD_OUT)))
        if split == "all":
            return [self._example(task) for task in tasks[:size]]
        random.Random(seed).shuffle(tasks)
        first = _held_out(held_out, len(tasks))
        if first >= len(tasks):
            raise DatasetError(
                f"{self._name}: {len(tasks)} tasks, of which {first} are to be held out: none is left to "
                "train on; choose a smaller `held_out`"
            )
        chosen = tasks[:first] if split == "validation" else tasks[first:][:size]
        return [self._example(task) for task in chosen]

    def of(self, example: Example) -> Any:
        """The task of an example: the one of its id, or one made of its inputs where it has others.

        Raises DatasetError when the inputs of an example that is no task of the taskset are none.
        """
        if (task := self._by_key.get(example.id)) is not None and self._is_of(example, task):
            return task
        task_type = type(self._taskset).task_type()
        data_type = task_type.data_type()
        columns = dict(example.inputs)
        if example.expected is not None and _ANSWER in data_type.model_fields:
            columns.setdefault(_ANSWER, example.expected)
        try:
            return task_type(data_type.model_validate(columns), self._taskset.config.task)
        except ValueError as error:
            raise DatasetError(
                f"example {example.id!r} is no task of {self._name}, and its columns make none: "
                f"{where_raised(error)}"
            ) from error

    def _read(self, source: Iterable[Any]) -> list[Any]:
        """All tasks of `source`, each noted by its key."""
        tasks: list[Any] = []
        places: dict[str, int] = {}
        try:
            for number, task in enumerate(source):
                first = places.setdefault(task.key, number)
                if first != number:
                    raise DatasetError(
                        f"{self._name}: tasks {first} and {number} have the same key {task.key!r}; leave one "
                        "out, or have `Task.key` return what tells them apart"
                    )
                tasks.append(task)
        except DatasetError:
            raise
        except Exception as error:
            raise DatasetError(f"{self._name} cannot be loaded: {where_raised(error)}") from error
        if not tasks:
            raise DatasetError(
                f"{self._name} has no tasks: its `load` yields none; is its data there, and the split right?"
            )
        self._by_key |= {task.key: task for task in tasks}
        return tasks

    def _is_of(self, example: Example, task: Any) -> bool:
        """Whether all that an example says is the task's: a dataset of one's own may have the same ids."""
        known = self._example(task)
        same = all(known.inputs.get(name) == value for name, value in example.inputs.items())
        return same and example.expected in (None, known.expected)

    @property
    def _name(self) -> str:
        return f"taskset '{self._taskset.config.id}'"

    def _example(self, task: Any) -> Example:
        inputs: Mapping[str, Any] = task.data.model_dump(mode="json", exclude_defaults=True)
        shown = {name: value for name, value in inputs.items() if name not in ("idx", _ANSWER)}
        return Example(task.key, shown, inputs.get(_ANSWER))


def _held_out(wanted: int | None, tasks: int) -> int:
    return min(HELD_OUT, tasks // 4) if wanted is None else wanted
