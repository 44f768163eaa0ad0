"""Programs as examples: the rows of Buggy APPS, and the right and wrong programs of each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from etude.config.component import DatasetConfig
from etude.config.registry import register_dataset
from etude.core.errors import DatasetError
from etude.core.example import Example
from etude.core.json_text import JsonError, read_json
from etude.protocols.decision import ACCEPT, REJECT
from etude.rollout.datasets import (
    FileDatasetConfig,
    HuggingFaceDatasetConfig,
    JsonDatasetConfig,
    JsonlDatasetConfig,
    ParquetDatasetConfig,
    Row,
)

if TYPE_CHECKING:
    from etude.config.builder import Builder

_FILES: Mapping[str, type[FileDatasetConfig]] = {
    ".jsonl": JsonlDatasetConfig,
    ".json": JsonDatasetConfig,
    ".parquet": ParquetDatasetConfig,
}
"""The files that problems are read from, by suffix."""
_IDS = ("apps_problem_id", "problem_id", "id")


class BuggyAppsConfig(DatasetConfig, name="buggy_apps"):
    """Right programs and wrong ones, in the columns of `lrhammond/buggy-apps`, or of APPS."""

    file_path: Path | None = None
    """A JSON Lines, JSON or Parquet file in place of the hub."""
    path: str = "lrhammond/buggy-apps"
    """Name on the hub, or a folder. Needs the extra `data`."""
    split: str | None = None
    """`train` or `test`. Of a file: the rows with this `apps_split`; by default all. Of the hub: by default
    `train`."""
    difficulty: str | None = None
    """Only problems of this difficulty, such as `interview`."""
    limit: int | None = Field(default=None, ge=1)
    """Use at most this many programs."""

    def examples(self) -> list[Example]:
        """An example for each program: inputs `question` and `solution`, expected 1 (right) or 0 (wrong).

        The right programs of a problem come first, then the wrong ones. Problems that are flagged are left
        out. Raises DatasetError for data that cannot be read, that has no programs as the config asks for, or
        where two problems have one id, and MissingExtraError.
        """
        examples: list[Example] = []
        where: dict[str, str] = {}
        for row in self._rows():
            id_, programs = _programs_of(row)
            if id_ in where:
                raise DatasetError(
                    f"{row.where}: problem id '{id_}' is taken already by {where[id_]}; name one `split`, or "
                    "make the ids unique"
                )
            where[id_] = row.where
            examples += programs
        if not examples:
            wanted = {"split": self.split, "difficulty": self.difficulty}
            asked = "".join(f", {key} {value!r}" for key, value in wanted.items() if value is not None)
            raise DatasetError(f"{self.file_path or self.path} holds no programs that are not flagged{asked}")
        return examples[: self.limit]

    def _rows(self) -> Iterator[Row]:
        """The rows that the config asks for."""
        source: FileDatasetConfig | HuggingFaceDatasetConfig
        if self.file_path is None:
            source = HuggingFaceDatasetConfig(path=self.path, split=self.split or "train")
        elif self.file_path.suffix.lower() in _FILES:
            source = _FILES[self.file_path.suffix.lower()](file_path=self.file_path)
        else:
            raise DatasetError(f"{self.file_path}: programs are read from {', '.join(_FILES)} files")
        for row in source.read():
            columns = row.content
            if not isinstance(columns, Mapping) or columns.get("flags"):
                continue
            is_other = self.file_path is not None and self.split not in (None, columns.get("apps_split"))
            if not is_other and self.difficulty in (None, columns.get("difficulty")):
                yield row


def _programs_of(row: Row) -> tuple[str, list[Example]]:
    """The id of a problem, and an example for each of its programs."""
    columns: Any = row.content
    question, id_ = columns.get("question"), next((columns[each] for each in _IDS if each in columns), None)
    if not isinstance(question, str) or id_ is None:
        raise DatasetError(
            f"{row.where}: there is no text in column 'question', or no id in 'apps_problem_id' or "
            "'problem_id'; the columns are those of lrhammond/buggy-apps"
        )
    examples = []
    for name, column, verdict in (("right", "solutions", ACCEPT), ("wrong", "buggy_solutions", REJECT)):
        for number, program in enumerate(_programs(columns.get(column), column, row.where)):
            inputs = {"question": question, "solution": program}
            examples.append(Example(f"{id_}-{name}-{number}", inputs, verdict))
    return str(id_), examples


def _programs(value: Any, name: str, where: str) -> Iterator[str]:
    """A list of texts, or of objects with a `solution`; either may be JSON. An empty text is no programs."""
    if isinstance(value, str):
        try:
            value = read_json(value) if value.strip() else None
        except JsonError as error:
            raise DatasetError(f"{where}: column '{name}' is broken JSON: {error}") from error
    if isinstance(value, Mapping):  # `datasets` keeps a list of objects as an object of lists.
        value = value.get("solution")
    if not isinstance(value, list | None):
        raise DatasetError(f"{where}: column '{name}' is no list of programs: {value!r:.80}")
    for item in value or ():
        program = item.get("solution") if isinstance(item, Mapping) else item
        if not isinstance(program, str):
            raise DatasetError(f"{where}: column '{name}' holds something that is no program: {item!r:.80}")
        yield program


@register_dataset(config_type=BuggyAppsConfig)
async def buggy_apps(config: BuggyAppsConfig, builder: Builder) -> AsyncIterator[BuggyAppsConfig]:
    """The registered component `buggy_apps`."""
    yield config
