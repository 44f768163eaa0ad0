"""Reading the rows of a dataset, each with the place it came from."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.config.import_path import import_object
from etude.config.nearest import nearest
from etude.core.errors import DatasetError, EtudeError, MissingExtraError
from etude.core.example import Example
from etude.rollout.dataset_config import (
    CsvDatasetConfig,
    FileDatasetConfig,
    HuggingFaceDatasetConfig,
    JsonDatasetConfig,
    JsonlDatasetConfig,
    LiveRowsConfig,
    ParquetDatasetConfig,
    PythonDatasetConfig,
    RowsConfig,
)
from etude.rollout.failures import failure_of


@dataclass(frozen=True, slots=True)
class Row:
    """One row, and where it stands: `file:line`, or the number of the row."""

    where: str
    content: Mapping[str, Any] | Example


def read_rows(config: RowsConfig) -> Iterator[Row]:
    """The rows that a config names.

    Raises DatasetError when they cannot be read, naming the place, and MissingExtraError when the
    libraries that read them are not installed.
    """
    match config:
        case FileDatasetConfig():
            yield from _read_file(config)
        case HuggingFaceDatasetConfig():
            yield from _number(config.path, _huggingface(config))
        case LiveRowsConfig():
            yield from _number(config.name, config.value)
        case PythonDatasetConfig():
            yield from _number(config.function, _python(config))
        case _:
            raise DatasetError(f"dataset type '{config.type_name}' has no reader")


def _read_file(config: FileDatasetConfig) -> Iterator[Row]:
    path = config.file_path
    if not path.is_file():
        raise DatasetError(_why_missing(path))
    try:
        match config:
            case JsonDatasetConfig():
                yield from _json(path)
            case JsonlDatasetConfig():
                yield from _jsonl(path)
            case CsvDatasetConfig():
                yield from _csv(path)
            case ParquetDatasetConfig():
                yield from _number(str(path), _parquet(path))
            case _:
                raise DatasetError(f"{path}: dataset type '{config.type_name}' has no reader")
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from error
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror or error}") from error


def _why_missing(path: Path) -> str:
    if path.exists():
        return f"dataset file {path} is not a file"
    if not path.parent.is_dir():
        return f"dataset file {path} does not exist: there is no folder {path.parent}"
    close = nearest(path.name, (file.name for file in path.parent.iterdir() if file.is_file()))
    return f"dataset file {path} does not exist" + (
        f"; did you mean '{path.parent / close}'?" if close else ""
    )


def _json(path: Path) -> Iterator[Row]:
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise DatasetError(f"{path}:{error.lineno}:{error.colno}: broken JSON: {error.msg}") from error
    if not isinstance(data, list):
        raise DatasetError(
            f"{path}: a JSON dataset is a list of objects, found {type(data).__name__}; "
            f"for one object per line use the type jsonl"
        )
    yield from _number(str(path), data)


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                content = json.loads(line)
            except json.JSONDecodeError as error:
                raise DatasetError(f"{where}:{error.colno}: broken JSON: {error.msg}") from error
            yield Row(where, _checked(where, content))


def _csv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for content in reader:
                where = f"{path}:{reader.line_num}"
                # DictReader keeps surplus fields under None, and gives missing ones the value None.
                if None in content or None in content.values():
                    amount = "more" if None in content else "fewer"
                    raise DatasetError(
                        f"{where}: this row has {amount} fields than the first line names columns "
                        f"({len(reader.fieldnames or ())}); put quotes around fields that hold commas"
                    )
                yield Row(where, content)
        except csv.Error as error:
            raise DatasetError(f"{path}:{reader.reader.line_num}: broken CSV: {error}") from error


def _parquet(path: Path) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("reading Parquet", "data") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise DatasetError(f"{path} cannot be read as Parquet: {error}") from error


def _huggingface(config: HuggingFaceDatasetConfig) -> Iterable[Any]:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("reading Hugging Face datasets", "data") from error
    try:
        rows: Iterable[Any] = datasets.load_dataset(
            config.path, config.subset, split=config.split, revision=config.revision
        )
    except (OSError, ValueError) as error:
        raise DatasetError(
            f"the dataset '{config.path}' (split {config.split}) cannot be loaded: {error}"
        ) from error
    return rows


def _python(config: PythonDatasetConfig) -> Iterator[Any]:
    source = import_object(config.function)
    try:
        rows = source(**config.arguments) if callable(source) else source
        if isinstance(rows, Mapping | str) or not isinstance(rows, Iterable):
            raise DatasetError(
                f"'{config.function}' must give an iterable of dicts or Examples, found {rows!r:.80}"
            )
        yield from rows
    except EtudeError:
        raise
    except Exception as error:  # the user's function
        raise DatasetError(f"'{config.function}' failed: {failure_of(error).reason}") from error


def _number(source: str, contents: Iterable[Any]) -> Iterator[Row]:
    for number, content in enumerate(contents, start=1):
        where = f"{source}: row {number}"
        yield Row(where, _checked(where, content))


def _checked(where: str, content: Any) -> Mapping[str, Any] | Example:
    if not isinstance(content, Mapping | Example):
        raise DatasetError(f"{where}: a row is an object with named columns, found {content!r:.80}")
    return content
