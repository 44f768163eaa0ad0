"""The rows of a log, from any kind of file, and each row's format."""

import gzip
import zlib
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from etude.config.data_files import MOST_VALUES, json_value, read_parquet
from etude.core.errors import DatasetError
from etude.core.evaluation import without_numbers
from etude.core.json_text import JsonError, read_json
from etude.wire import langfuse, openai_traces, otlp
from etude.wire.trace_record import Record, RowError, RowValue, SkippedEntry, shown

FORMATS: Mapping[str, ModuleType] = {"otlp": otlp, "langfuse": langfuse, "openai": openai_traces}
"""In the order in which they are tried on a row."""

_MARK = b"\xef\xbb\xbf"
_BLANK = _MARK + b" \t\r\n"


Row: TypeAlias = tuple[str, Any]
"""A row's position, `file:line` or `file: row 3`, and its value, or a RowError if it has none."""


def read_records(path: Path, format: str | None = None, *, skip_broken: bool = False) -> Iterator[Record]:
    """Read the entries of a log. Each row shows its own format, unless `format` is given.

    Raises DatasetError for an unreadable file, and RowError for a row that breaks its format. `skip_broken`
    leaves such rows out, with the reason.
    """
    for where, content in read_log_rows(path):
        try:
            if isinstance(content, RowError):
                raise content
            if not isinstance(content, Mapping):
                raise RowError(where, f"a row must be an object, found {shown(content)}")
            fitting = (module for module in FORMATS.values() if module.fits(content))
            module = next(fitting, None) if format is None else FORMATS[format]
            if module is None:
                known = ", ".join(FORMATS)
                raise RowError(where, f"a row must have a known format ({known}), found {shown(content)}")
            yield from list(module.read(RowValue(content, where)))
        except RowError as error:
            if not skip_broken:
                remedy = "fix it, or leave such rows out with --skip-broken"
                raise RowError(error.where, f"{error.problem}; {remedy}") from error
            yield SkippedEntry(error.where, f"broken: {without_numbers(error.problem)[:120]}")


def read_log_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a JSON Lines, JSON or Parquet file, the first two also with gzip.

    Raises DatasetError if it cannot be read.
    """
    if not path.is_file():
        raise DatasetError(f"{path} does not exist" if not path.exists() else f"{path} is not a file")
    try:
        yield from read_parquet(path) if path.suffix == ".parquet" else _json(path)
    except (OSError, EOFError, zlib.error) as error:
        raise DatasetError(f"{path} cannot be read: {error}") from error


def _json(path: Path) -> Iterator[Row]:
    """Yield one row per line, or the rows of one value over many lines: a list of rows, or a row."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip(_BLANK))
        for number, line in islice(lines, 1):
            if line.rstrip().endswith((b"[", b"{", b",")):
                file.seek(0)
                try:
                    yield from _items(str(path), json_value(file.read(), path))
                except DatasetError as error:
                    raise DatasetError(f"{error}; fix it, or write one row per line") from error
                return
            # The first line may be a list of all rows.
            yield from _items(*_row(path, number, line))
        yield from (_row(path, *line) for line in lines)


def _row(path: Path, number: int, line: bytes) -> Row:
    where = f"{path}:{number}"
    try:
        return where, read_json(line.removeprefix(_MARK), most_values=MOST_VALUES)
    except JsonError as error:
        return where, RowError(where, f"broken JSON: {error.problem}")


def _items(where: str, value: Any) -> Iterator[Row]:
    """Yield the items of a list, or any other value as one row."""
    if not isinstance(value, list):
        yield where, value
        return
    for index, item in enumerate(value, start=1):
        yield f"{where}: row {index}", item
