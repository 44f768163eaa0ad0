"""Where examples come from: the configs of the shipped dataset types."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from etude.config.component import DatasetConfig


class DatasetStructure(BaseModel):
    """Which columns hold the question and the answer."""

    model_config = ConfigDict(extra="forbid")

    question_key: str = Field(default="question", description="The column that becomes the input `question`.")
    answer_key: str = Field(default="answer", description="The column that becomes the expected answer.")


class RowsConfig(DatasetConfig):
    """What all dataset types can say: which columns become what, and how many rows are used."""

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


class FileDatasetConfig(RowsConfig):
    """A dataset in one file."""

    file_path: Path = Field(description="The file.")


class JsonDatasetConfig(FileDatasetConfig, name="json"):
    """A JSON file: a list of objects."""


class JsonlDatasetConfig(FileDatasetConfig, name="jsonl"):
    """A JSON Lines file: one object per line."""


class CsvDatasetConfig(FileDatasetConfig, name="csv"):
    """A CSV file whose first line names the columns. All values are text."""


class ParquetDatasetConfig(FileDatasetConfig, name="parquet"):
    """A Parquet file. Needs the extra `data`."""


class HuggingFaceDatasetConfig(RowsConfig, name="huggingface"):
    """A dataset of the Hugging Face hub, or a local folder of one. Needs the extra `data`."""

    path: str = Field(description="Name on the hub, or a folder.")
    subset: str | None = Field(default=None, description="The dataset's configuration, where it has several.")
    split: str = Field(default="train", description="The split; slices such as `train[:100]` work.")
    revision: str | None = Field(default=None, description="Version on the hub.")


class LiveRowsConfig(RowsConfig, name="live"):
    """Rows that a program gave to `etude.train` or `etude.evaluate` as a Python object."""

    name: str = Field(description="A word for them.")
    value: Any = Field(default=None, exclude=True, repr=False)


class PythonDatasetConfig(RowsConfig, name="python"):
    """Rows from a Python function, or from any iterable of dicts or Examples."""

    function: str = Field(description="`package.module:name` of the function or iterable.")
    arguments: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the function.")
