"""Readers of data files: JSON, JSON Lines, CSV and Parquet.

Each row comes with its place. A problem with a file is a DatasetError that names the place.
"""

import csv
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from etude.core.errors import DatasetError, MissingExtraError
from etude.core.json_text import JsonError, read_json, to_utf8

MOST_VALUES = 100_000_000
"""Most values of one JSON text in a file, which may be a single list."""

_WHOLE_LINES = "each line is one whole object, with no comma after it"

PlacedRow: TypeAlias = tuple[str, Any]
"""A place, `file:line` or `file: row 3`, and the content."""


def read_json_list(path: Path) -> Iterator[PlacedRow]:
    """Yield the values of a JSON file that has a list. Raises DatasetError."""
    with readable(path):
        text = path.read_bytes()
    hint = "the file is one whole list; for one object on each line use the type jsonl"
    data = json_value(text, path, hint=hint)
    if not isinstance(data, list):
        raise DatasetError(f"{path}: a JSON dataset must be a list of objects; {hint}")
    for number, content in enumerate(data, start=1):
        yield f"{path}: row {number}", content


def read_jsonl(path: Path) -> Iterator[PlacedRow]:
    """Yield the values of a JSON Lines file. Raises DatasetError."""
    # Bytes that are not UTF-8 become half surrogates, which `json_value` refuses.
    with readable(path), path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path}:{number}", json_value(line.rstrip("\n"), path, number, _WHOLE_LINES)


def json_value(text: bytes | str, path: Path, first_line: int = 1, hint: str = "") -> Any:
    """Return the value of a JSON text that begins at a line of a file. Raises DatasetError.

    `hint` says what to do if the text is less or more than one value.
    """
    try:
        return read_json(text, most_values=MOST_VALUES)
    except JsonError as error:
        line = first_line - 1 + (error.line or 1)
        column = f":{error.column}" if error.column else ""
        is_other = hint and error.problem.startswith(("EOF", "trailing characters"))
        problem = f"{error.problem}; {hint}" if is_other else error.problem
        raise DatasetError(f"{path}:{line}{column}: broken JSON: {problem}") from error


def read_csv(path: Path) -> Iterator[PlacedRow]:
    """Yield the rows of a CSV file as objects, by the names in the first line, without blanks around names
    and after commas. Raises DatasetError."""
    with readable(path), path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        rows = _fields(path, file)
        _, header = next(rows, ("", []))
        names = [name.strip() for name in header]
        twice = next((name for name, count in Counter(names).items() if count > 1), None)
        if twice is not None:
            columns = f"two columns are named '{twice}'" if twice else "two columns have no name"
            raise DatasetError(f"{path}:1: {columns}; give each its own name")
        for where, fields in rows:
            if len(fields) != len(names):
                amount = "more" if len(fields) > len(names) else "fewer"
                raise DatasetError(
                    f"{where}: this row has {amount} fields than the first line names columns "
                    f"({len(names)}); put quotes around fields that hold commas"
                )
            yield where, dict(zip(names, fields, strict=True))


def _fields(path: Path, file: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the fields of each line that has some, with its place. Raises DatasetError."""
    reader = csv.reader(file, strict=True, skipinitialspace=True)
    csv.field_size_limit(2**31 - 1)
    while True:
        try:
            if (fields := next(reader, None)) is None:
                return
            to_utf8("".join(fields))
        except (csv.Error, JsonError) as error:
            raise DatasetError(f"{path}:{reader.line_num}: broken CSV: {error}") from error
        if fields:
            yield f"{path}:{reader.line_num}", fields


def read_parquet(path: Path) -> Iterator[PlacedRow]:
    """Yield the rows of a Parquet file. Raises DatasetError, or MissingExtraError without `data`."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("reading Parquet", "data") from error
    number = 0
    try:
        with readable(path), pyarrow.parquet.ParquetFile(path) as file:
            names = Counter(file.schema_arrow.names)
            if twice := next((name for name, count in names.items() if count > 1), None):
                raise DatasetError(f"{path}: two columns are named '{twice}'; give each its own name")
            for batch in file.iter_batches():
                for content in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", content
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        after = f" after row {number}" if number else ""
        raise DatasetError(f"{path} cannot be read as Parquet{after}: {error}") from error


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise DatasetError if the file cannot be read in the block."""
    try:
        yield
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror or error}") from error
