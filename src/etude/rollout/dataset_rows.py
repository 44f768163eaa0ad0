"""The shipped dataset types: their configs, each of which reads its own rows."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from etude.config.component import DatasetConfig
from etude.config.import_path import import_object
from etude.config.nearest import nearest
from etude.core.errors import DatasetError, EtudeError, MissingExtraError
from etude.core.example import Example
from etude.rollout.run_workflow import failure_of


@dataclass(frozen=True, slots=True)
class Row:
    """One row, and where it stands: `file:line`, or the number of the row."""

    where: str
    content: Mapping[str, Any] | Example

    def __post_init__(self) -> None:
        """Raises DatasetError for what has no named columns."""
        if not isinstance(self.content, Mapping | Example):
            raise DatasetError(
                f"{self.where}: a row is an object with named columns, found {self.content!r:.80}"
            )


class DatasetStructure(BaseModel):
    """Which columns hold the question and the answer."""

    model_config = ConfigDict(extra="forbid")

    question_key: str = Field(default="question", description="The column that becomes the input `question`.")
    answer_key: str = Field(default="answer", description="The column that becomes the expected answer.")


class RowsConfig(DatasetConfig):
    """Options of all dataset types: which columns become what, and how many rows are used."""

    id_key: str = Field(default="id", description="The column that holds each row's id.")
    ids: Literal["column", "from_row"] = Field(
        default="column", description="`from_row` makes a stable id from each row's content."
    )
    inputs: list[str] | None = Field(
        default=None, description="Columns the agent is given; by default all but id and expected answer."
    )
    expected: str | None = Field(
        default=None,
        description="The column of the expected answer; by default `expected`, or else `answer`.",
    )
    structure: DatasetStructure | None = Field(
        default=None, description="Names the columns of question and answer, where they are called otherwise."
    )
    limit: int | None = Field(default=None, ge=1, description="Use at most this many rows.")
    shuffle: bool = Field(default=False, description="Shuffle the rows, before `limit` is applied.")
    seed: int = Field(default=0, ge=0, description="Seed of the shuffling.")

    @property
    def source(self) -> str:
        """The origin of the rows, for errors."""
        return f"the {self.type_name} dataset"

    def read(self) -> Iterator[Row]:
        """The rows, one at a time.

        Raises DatasetError when they cannot be read, naming the place, and MissingExtraError when the
        libraries that read them are not installed.
        """
        for number, content in enumerate(self._contents(), start=1):
            yield Row(f"{self.source}: row {number}", content)

    def _contents(self) -> Iterable[Any]:
        raise DatasetError(f"dataset type '{self.type_name}' has no reader")


class FileDatasetConfig(RowsConfig):
    """A dataset in one file."""

    file_path: Path = Field(description="The file.")

    @property
    def source(self) -> str:
        """The file."""
        return str(self.file_path)

    def read(self) -> Iterator[Row]:
        """The rows of the file. Raises DatasetError when it is missing, not UTF-8 or not readable."""
        path = self.file_path
        if not path.is_file():
            raise DatasetError(_why_missing(path))
        try:
            yield from self._rows()
        except UnicodeDecodeError as error:
            raise DatasetError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from error
        except OSError as error:
            raise DatasetError(f"{path} cannot be read: {error.strerror or error}") from error

    def _rows(self) -> Iterator[Row]:
        return super().read()


class JsonDatasetConfig(FileDatasetConfig, name="json"):
    """A JSON file: a list of objects."""

    def _contents(self) -> Iterable[Any]:
        path = self.file_path
        try:
            data = json.loads(path.read_text(encoding="utf-8-sig"))
        except json.JSONDecodeError as error:
            raise DatasetError(f"{path}:{error.lineno}:{error.colno}: broken JSON: {error.msg}") from error
        if not isinstance(data, list):
            raise DatasetError(
                f"{path}: a JSON dataset is a list of objects, found {type(data).__name__}; "
                f"for one object per line use the type jsonl"
            )
        return data


class JsonlDatasetConfig(FileDatasetConfig, name="jsonl"):
    """A JSON Lines file: one object per line."""

    def _rows(self) -> Iterator[Row]:
        with self.file_path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                where = f"{self.file_path}:{number}"
                try:
                    if line.strip():
                        yield Row(where, json.loads(line))
                except json.JSONDecodeError as error:
                    raise DatasetError(f"{where}:{error.colno}: broken JSON: {error.msg}") from error


class CsvDatasetConfig(FileDatasetConfig, name="csv"):
    """A CSV file whose first line names the columns. All values are text."""

    def _rows(self) -> Iterator[Row]:
        with self.file_path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            try:
                for content in reader:
                    where = f"{self.file_path}:{reader.line_num}"
                    # DictReader keeps surplus fields under None, and gives missing ones the value None.
                    if None in content or None in content.values():
                        amount = "more" if None in content else "fewer"
                        raise DatasetError(
                            f"{where}: this row has {amount} fields than the first line names columns "
                            f"({len(reader.fieldnames or ())}); put quotes around fields that hold commas"
                        )
                    yield Row(where, content)
            except csv.Error as error:
                where = f"{self.file_path}:{reader.reader.line_num}"
                raise DatasetError(f"{where}: broken CSV: {error}") from error


class ParquetDatasetConfig(FileDatasetConfig, name="parquet"):
    """A Parquet file. Needs the extra `data`."""

    def _contents(self) -> Iterator[Any]:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise MissingExtraError("reading Parquet", "data") from error
        try:
            with pyarrow.parquet.ParquetFile(self.file_path) as file:
                for batch in file.iter_batches():
                    yield from batch.to_pylist()
        except pyarrow.ArrowException as error:
            raise DatasetError(f"{self.file_path} cannot be read as Parquet: {error}") from error


class HuggingFaceDatasetConfig(RowsConfig, name="huggingface"):
    """A dataset of the Hugging Face hub, or a local folder of one. Needs the extra `data`."""

    path: str = Field(description="Name on the hub, or a folder.")
    subset: str | None = Field(default=None, description="The dataset's configuration, where it has several.")
    split: str = Field(default="train", description="The split; slices such as `train[:100]` work.")
    revision: str | None = Field(default=None, description="Version on the hub.")

    @property
    def source(self) -> str:
        """The dataset's name on the hub, or its folder."""
        return self.path

    def _contents(self) -> Iterable[Any]:
        try:
            import datasets
        except ImportError as error:
            raise MissingExtraError("reading Hugging Face datasets", "data") from error
        try:
            rows: Iterable[Any] = datasets.load_dataset(
                self.path, self.subset, split=self.split, revision=self.revision
            )
        except (OSError, ValueError) as error:
            raise DatasetError(
                f"the dataset '{self.path}' (split {self.split}) cannot be loaded: {error}"
            ) from error
        return rows


class LiveRowsConfig(RowsConfig, name="live"):
    """Rows that a program gave to `etude.train` or `etude.evaluate` as a Python object."""

    name: str = Field(description="A word for them.")
    value: Any = Field(default=None, exclude=True, repr=False)

    @property
    def source(self) -> str:
        """The word for them."""
        return self.name

    def _contents(self) -> Iterable[Any]:
        rows: Iterable[Any] = self.value
        return rows


class PythonDatasetConfig(RowsConfig, name="python"):
    """Rows from a Python function, or from any iterable of dicts or Examples."""

    function: str = Field(description="`package.module:name` of the function or iterable.")
    arguments: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the function.")

    @property
    def source(self) -> str:
        """The function's import path."""
        return self.function

    def _contents(self) -> Iterator[Any]:
        origin = import_object(self.function)
        try:
            rows = origin(**self.arguments) if callable(origin) else origin
            if isinstance(rows, Mapping | str) or not isinstance(rows, Iterable):
                raise DatasetError(
                    f"'{self.function}' must give an iterable of dicts or Examples, found {rows!r:.80}"
                )
            yield from rows
        except EtudeError:
            raise
        except Exception as error:  # the user's function
            raise DatasetError(f"'{self.function}' failed: {failure_of(error).reason}") from error


def _why_missing(path: Path) -> str:
    if path.exists():
        return f"dataset file {path} is not a file"
    if not path.parent.is_dir():
        return f"dataset file {path} does not exist: there is no folder {path.parent}"
    close = nearest(path.name, (file.name for file in path.parent.iterdir() if file.is_file()))
    hint = f"; did you mean '{path.parent / close}'?" if close else ""
    return f"dataset file {path} does not exist{hint}"
