"""Problems with their programs, read from rows with the columns of APPS or of Buggy APPS."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.core.errors import DatasetError, RequestError
from etude.rollout.dataset_rows import (
    FileDatasetConfig,
    HuggingFaceDatasetConfig,
    JsonDatasetConfig,
    JsonlDatasetConfig,
    ParquetDatasetConfig,
    RowsConfig,
)
from etude.scenarios.dataset_config import ProgramsConfig
from etude.scenarios.sandbox.check import IoTests

FILE_TYPES: Mapping[str, type[FileDatasetConfig]] = {
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
    difficulty: str
    split: str | None
    tests: IoTests | None
    """None where the row has none."""


def read_problems(config: ProgramsConfig, left_out: Counter[str] | None = None) -> Iterator[ProgramProblem]:
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
        elif left_out is not None:
            left_out[reason] += 1


def _problem(where: str, columns: Mapping[str, Any]) -> ProgramProblem:
    question = columns.get("question")
    if not isinstance(question, str):
        raise DatasetError(
            f"{where}: there is no text in column 'question'; the columns are those of codeparrot/apps "
            "or lrhammond/buggy-apps"
        )
    found = next((columns[name] for name in ("apps_problem_id", "problem_id", "id") if name in columns), None)
    if found is None:
        raise DatasetError(f"{where}: there is no id in column 'problem_id' or 'apps_problem_id'")
    split = columns.get("apps_split")
    return ProgramProblem(
        id=str(found),
        where=where,
        question=question,
        right=_programs(columns, "solutions", where),
        wrong=_programs(columns, "buggy_solutions", where),
        difficulty=str(columns.get("difficulty") or ""),
        split=None if split is None else str(split),
        tests=_tests(columns, where),
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
    made = FILE_TYPES.get(path.suffix.lower())
    if made is None:
        raise DatasetError(f"{path}: programs are read from {', '.join(FILE_TYPES)} files")
    return made(file_path=path)


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
    found = _json(columns.get(name), name, where)
    if found is None:
        return ()
    if isinstance(found, Mapping):
        # `datasets` keeps a list of objects as an object of lists.
        found = found.get("solution")
    if not isinstance(found, list):
        raise DatasetError(f"{where}: column '{name}' is no list of programs: {found!r:.80}")
    programs: list[str] = []
    for one in found:
        program = one.get("solution") if isinstance(one, Mapping) else one
        if not isinstance(program, str):
            raise DatasetError(f"{where}: column '{name}' holds something that is no program: {one!r:.80}")
        programs.append(program)
    return tuple(programs)


def _tests(columns: Mapping[str, Any], where: str) -> IoTests | None:
    found = _json(columns.get("input_output"), "input_output", where)
    if not found:
        return None
    try:
        tests = IoTests.from_json(found)
    except RequestError as error:
        raise DatasetError(f"{where}: column 'input_output': {error}") from error
    return tests if len(tests) else None


def _json(value: Any, name: str, where: str) -> Any:
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except ValueError as error:
        raise DatasetError(f"{where}: column '{name}' is broken JSON: {error}") from error
