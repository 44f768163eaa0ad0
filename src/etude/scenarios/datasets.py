"""Programs as examples: the rows of APPS and Buggy APPS, their problems, and the programs of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from etude.config.component import DatasetConfig
from etude.config.registry import register_dataset
from etude.core.errors import DatasetError
from etude.core.example import Example
from etude.core.json_text import JsonError, read_json
from etude.core.keys import generator
from etude.protocols.decision import ACCEPT, REJECT
from etude.rollout.datasets import (
    FileDatasetConfig,
    HuggingFaceDatasetConfig,
    JsonDatasetConfig,
    JsonlDatasetConfig,
    ParquetDatasetConfig,
    RowsConfig,
)

if TYPE_CHECKING:
    from etude.config.builder import Builder

APPS = "codeparrot/apps"
BUGGY_APPS = "lrhammond/buggy-apps"


class ProgramsConfig(DatasetConfig):
    """Keys that both data sets share."""

    file_path: Path | None = Field(
        default=None, description="A JSON Lines, JSON or Parquet file in place of the hub."
    )
    path: str = Field(default=APPS, description="Name on the hub, or a folder. Needs the extra `data`.")
    subset: str | None = Field(default=None, description="The dataset's configuration, where it has several.")
    revision: str | None = Field(default=None, description="Version on the hub.")
    split: str | None = Field(
        default=None,
        description="`train` or `test`. Of a file: the rows with this `apps_split`; by default all. Of the "
        "hub: by default `train`.",
    )
    difficulty: Literal["introductory", "interview", "competition"] | None = Field(
        default=None, description="Only problems of this difficulty."
    )
    exclude_flagged: bool = Field(
        default=True, description="Leave out problems that were flagged, where the data has flags."
    )
    solution_number: int | None = Field(
        default=None, ge=0, description="Only the solution of this number of each problem, from 0."
    )
    limit: int | None = Field(default=None, ge=1, description="Use at most this many programs.")
    shuffle: bool = Field(default=False, description="Shuffle the programs, before `limit` is applied.")
    seed: int = Field(default=0, ge=0, description="Seed of the shuffling.")


class AppsConfig(ProgramsConfig, name="apps"):
    """Programs of APPS, all of them right; by default the first of each problem."""

    solution_number: int | None = Field(
        default=0, ge=0, description="Only the solution of this number of each problem; null for all."
    )


class BuggyAppsConfig(ProgramsConfig, name="buggy_apps"):
    """Right programs and wrong ones, in the columns of `lrhammond/buggy-apps`."""

    path: str = Field(default=BUGGY_APPS, description="Name on the hub, or a folder. Needs the extra `data`.")


_FILES: Mapping[str, type[FileDatasetConfig]] = {
    ".jsonl": JsonlDatasetConfig,
    ".json": JsonDatasetConfig,
    ".parquet": ParquetDatasetConfig,
}
"""The files that problems are read from, by suffix."""


@dataclass(frozen=True, slots=True)
class ProgramProblem:
    """One row: a problem, programs that solve it, and programs that do not."""

    id: str
    where: str
    """The place it was read from, for errors: `file:line`."""
    question: str
    right: tuple[str, ...]
    wrong: tuple[str, ...]


def read_problems(config: ProgramsConfig, left_out: Counter[str]) -> Iterator[ProgramProblem]:
    """The problems that a config asks for, one at a time, in the order of the rows.

    Rows that it does not ask for are counted in `left_out`, by reason. Raises DatasetError for rows that
    cannot be read, naming the place, and MissingExtraError where the libraries that read them are not
    installed.
    """
    rows = _rows(config).read()
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except RuntimeError as error:
            # What `datasets` says of a dataset that is a script, as codeparrot/apps is.
            raise DatasetError(
                f"'{config.path}' cannot be loaded: {error}. Name a copy of it in Parquet with `path`, or a "
                "file with `file_path`"
            ) from error
        columns = row.content
        if not isinstance(columns, Mapping):
            continue
        reason = _reason_to_leave_out(columns, config, row.where)
        if reason is None:
            yield _problem(row.where, columns)
        else:
            left_out[reason] += 1


def _problem(where: str, columns: Mapping[str, Any]) -> ProgramProblem:
    question = columns.get("question")
    if not isinstance(question, str):
        raise DatasetError(
            f"{where}: there is no text in column 'question'; the columns are those of codeparrot/apps "
            "or lrhammond/buggy-apps"
        )
    id_ = next((columns[name] for name in ("apps_problem_id", "problem_id", "id") if name in columns), None)
    if id_ is None:
        raise DatasetError(f"{where}: there is no id in column 'problem_id' or 'apps_problem_id'")
    return ProgramProblem(
        id=str(id_),
        where=where,
        question=question,
        right=_programs(columns, "solutions", where),
        wrong=_programs(columns, "buggy_solutions", where),
    )


def _rows(config: ProgramsConfig) -> RowsConfig:
    if config.file_path is None:
        return HuggingFaceDatasetConfig(
            path=config.path,
            subset=config.subset,
            split=config.split or "train",
            revision=config.revision,
        )
    return _file(config.file_path)


def _file(path: Path) -> FileDatasetConfig:
    config_type = _FILES.get(path.suffix.lower())
    if config_type is None:
        raise DatasetError(f"{path}: programs are read from {', '.join(_FILES)} files")
    return config_type(file_path=path)


def _reason_to_leave_out(columns: Mapping[str, Any], config: ProgramsConfig, where: str) -> str | None:
    """Why a row is none that the config asks for; None when it is one."""
    difficulty = columns.get("difficulty")
    if config.difficulty is not None and difficulty != config.difficulty:
        return f"of difficulty {difficulty!r:.40}, not {config.difficulty!r}"
    if config.exclude_flagged and columns.get("flags"):
        return "flagged, and `exclude_flagged` is true"
    if config.split is None or config.file_path is None:
        return None
    if "apps_split" not in columns:
        raise DatasetError(f"{where}: there is no column 'apps_split'; leave `split` out to use all rows")
    split = columns["apps_split"]
    return None if split == config.split else f"of split {split!r:.40}, not {config.split!r}"


def _programs(columns: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    """A list of texts, or of objects with a `solution`; either may be JSON. An empty text is no programs."""
    column = _json(columns.get(name), name, where)
    if column is None:
        return ()
    if isinstance(column, Mapping):
        # `datasets` keeps a list of objects as an object of lists.
        column = column.get("solution")
    if not isinstance(column, list):
        raise DatasetError(f"{where}: column '{name}' is no list of programs: {column!r:.80}")
    programs: list[str] = []
    for item in column:
        program = item.get("solution") if isinstance(item, Mapping) else item
        if not isinstance(program, str):
            raise DatasetError(f"{where}: column '{name}' holds something that is no program: {item!r:.80}")
        programs.append(program)
    return tuple(programs)


def _json(value: Any, name: str, where: str) -> Any:
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return read_json(value)
    except JsonError as error:
        raise DatasetError(f"{where}: column '{name}' is broken JSON: {error}") from error


class Programs:
    """The programs that a config describes."""

    def __init__(self, config: ProgramsConfig) -> None:
        self._config = config

    def examples(self) -> list[Example]:
        """All examples, in order. Raises DatasetError when they cannot be read."""
        return load_programs(self._config)


def load_programs(config: ProgramsConfig) -> list[Example]:
    """An example for each program: inputs `question` and `solution`, expected 1 (right) or 0 (wrong).

    The right programs of a problem come first, then the wrong ones. Raises DatasetError for data that
    cannot be read, that has no programs as the config asks for, or where two problems have one id.
    """
    examples: list[Example] = []
    where: dict[str, str] = {}
    left_out: Counter[str] = Counter()
    for problem in read_problems(config, left_out):
        if problem.id in where:
            raise DatasetError(
                f"{problem.where}: problem id '{problem.id}' is taken already by {where[problem.id]}; "
                "name one `split`, or make the ids unique"
            )
        where[problem.id] = problem.where
        examples += _examples(problem, config)
    if not examples:
        raise DatasetError(
            f"{config.file_path or config.path}: {_nothing_left(config, len(where), left_out)}"
        )
    if config.shuffle:
        generator(config.seed, "programs").shuffle(examples)
    return examples[: config.limit]


def _nothing_left(config: ProgramsConfig, problems: int, left_out: Counter[str]) -> str:
    """Why there is no program: what the config asked for that no row has."""
    rows = problems + left_out.total()
    reasons = [f"{count} {reason}" for reason, count in left_out.most_common()]
    if problems and config.solution_number is not None:
        reasons.append(f"{problems} without a program number {config.solution_number} (`solution_number`)")
    elif problems:
        reasons.append(f"{problems} without programs")
    return f"no programs are left of {rows} problems" + (f": {'; '.join(reasons)}" if reasons else "")


def _examples(problem: ProgramProblem, config: ProgramsConfig) -> Iterator[Example]:
    for name, programs, verdict in (("right", problem.right, ACCEPT), ("wrong", problem.wrong, REJECT)):
        for number, program in enumerate(programs):
            if config.solution_number in (None, number):
                inputs = {"question": problem.question, "solution": program}
                yield Example(f"{problem.id}-{name}-{number}", inputs, verdict)


@register_dataset(config_type=AppsConfig)
@register_dataset(config_type=BuggyAppsConfig)
async def programs(config: ProgramsConfig, builder: Builder) -> AsyncIterator[Programs]:
    """Both data sets have rows that are read alike."""
    yield Programs(config)
