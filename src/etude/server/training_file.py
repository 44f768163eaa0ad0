"""Training files: every line checked before the file is taken."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from etude.core.training_rows import ROWS, DpoRow, GrpoRow, SupervisedRow, method_of
from etude.core.trajectory import Method
from etude.server.errors import ApiError, problems_of

_LONGEST_LINE = 16 * 2**20


@dataclass(frozen=True, slots=True)
class TrainingFile:
    """What a file holds."""

    method: Method
    rows: int


def check_training_file(filename: str, file: BinaryIO) -> TrainingFile:
    """Read every line of an upload, one at a time. Raises ApiError with file, line and field."""
    method: Method | None = None
    rows = 0
    for number, line in _lines(filename, file):
        where = f"{filename}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _refused(f"{where}: not JSON: {error}") from error
        found = method_of(row)
        if found is None:
            raise _refused(
                f"{where}: no training row; it needs `messages` (supervised), `input`, `preferred_output` "
                "and `non_preferred_output` (dpo), or `trajectories` (grpo)"
            )
        if method is not None and found != method:
            raise _refused(f"{where}: a row for {found}, and those before it are for {method}")
        method, rows = found, rows + 1
        try:
            ROWS[found].model_validate(row)
        except ValidationError as error:
            told, _ = problems_of(error.errors(include_url=False, include_input=False))
            raise _refused(f"{where}: {told}") from error
    if method is None:
        raise _refused(f"{filename} has no lines")
    return TrainingFile(method, rows)


def read_rows(path: Path, method: Method) -> Iterator[SupervisedRow | DpoRow | GrpoRow]:
    """The rows of a file that was checked when it came."""
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield ROWS[method].model_validate_json(line)


def _lines(filename: str, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(_LONGEST_LINE + 1):
        number += 1
        if len(line) > _LONGEST_LINE:
            raise _refused(f"{filename}, line {number}: longer than {_LONGEST_LINE} bytes")
        if line.strip():
            yield number, line


def _refused(message: str) -> ApiError:
    return ApiError(400, message, param="file", code="invalid_training_file")
