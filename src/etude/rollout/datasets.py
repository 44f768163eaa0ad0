"""From rows to examples: which column is what, and an id for each that is unique and stable."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from etude.config.nearest import alternatives
from etude.config.registry import register_dataset
from etude.core.errors import DatasetError
from etude.core.example import Example
from etude.core.keys import content_hash, generator
from etude.rollout.dataset_rows import (
    CsvDatasetConfig,
    HuggingFaceDatasetConfig,
    JsonDatasetConfig,
    JsonlDatasetConfig,
    ParquetDatasetConfig,
    PythonDatasetConfig,
    Row,
    RowsConfig,
)

if TYPE_CHECKING:
    from etude.config.builder import Builder

_EXPECTED_COLUMNS = ("expected", "answer")
"""Taken for the expected answer when the config names no column."""


class Dataset:
    """The examples that a config describes."""

    def __init__(self, config: RowsConfig) -> None:
        self._config = config

    def examples(self) -> list[Example]:
        """All examples, in order. Raises DatasetError when they cannot be read."""
        return load_examples(self._config)


def load_examples(config: RowsConfig) -> list[Example]:
    """The examples that a config describes, in the order of the rows, or shuffled when it says so.

    Raises DatasetError for a dataset that is missing, broken or empty, for a column that is not
    there, and for an id that is missing or not unique; the message names the row. Raises
    MissingExtraError when the libraries that read it are not installed.
    """
    examples = _unique([(row.where, _example(config, row)) for row in config.read()], config)
    if not examples:
        raise DatasetError(f"{config.source} holds no examples")
    if config.shuffle:
        generator(config.seed, "dataset").shuffle(examples)
    return examples[: config.limit]


def _example(config: RowsConfig, row: Row) -> Example:
    if isinstance(row.content, Example):
        return row.content
    columns = dict(row.content)
    expected = _expected_column(config, columns, row.where)
    taken = {expected, config.id_key if config.ids == "column" else None}
    names = config.inputs
    if names is None:
        names = [name for name in columns if name not in taken]
    inputs = {name: _column(columns, name, row.where) for name in names}
    if config.structure is not None:
        question = _column(columns, config.structure.question_key, row.where)
        inputs.pop(config.structure.question_key, None)
        inputs["question"] = question
    return Example(
        id=_id(config, columns, row.where),
        inputs=inputs,
        expected=None if expected is None else _column(columns, expected, row.where),
    )


def _expected_column(config: RowsConfig, columns: Mapping[str, Any], where: str) -> str | None:
    """The column of the expected answer; None when there is none."""
    named = config.expected or (config.structure.answer_key if config.structure else None)
    if named is not None:
        _column(columns, named, where)
        return named
    return next((name for name in _EXPECTED_COLUMNS if name in columns), None)


def _column(columns: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in columns:
        raise DatasetError(f"{where}: there is no column '{name}'" + alternatives(name, columns))
    return columns[name]


def _id(config: RowsConfig, columns: Mapping[str, Any], where: str) -> str:
    if config.ids == "from_row":
        return content_hash(columns)
    value = columns.get(config.id_key)
    if value is None or value == "":
        raise DatasetError(
            f"{where}: there is no id in column '{config.id_key}'; name the column with `id_key`, "
            f"or set `ids: from_row` to make ids from the rows"
        )
    return str(value)


def _unique(examples: Sequence[tuple[str, Example]], config: RowsConfig) -> list[Example]:
    """The examples, when no two have one id; equal rows that make their own ids are numbered."""
    first: dict[str, str] = {}
    count: Counter[str] = Counter()
    unique = []
    for where, example in examples:
        count[example.id] += 1
        if example.id in first and config.ids == "from_row":
            example = Example(f"{example.id}-{count[example.id]}", example.inputs, example.expected)
        if example.id in first:
            raise DatasetError(
                f"{where}: id '{example.id}' is taken already by {first[example.id]}; "
                f"make ids unique, or set `ids: from_row` to make them from the rows"
            )
        first[example.id] = where
        unique.append(example)
    return unique


@register_dataset(config_type=JsonDatasetConfig)
@register_dataset(config_type=JsonlDatasetConfig)
@register_dataset(config_type=CsvDatasetConfig)
@register_dataset(config_type=ParquetDatasetConfig)
@register_dataset(config_type=HuggingFaceDatasetConfig)
@register_dataset(config_type=PythonDatasetConfig)
async def dataset(config: RowsConfig, builder: Builder) -> AsyncIterator[Dataset]:
    """All shipped dataset types are rows, read in different ways."""
    yield Dataset(config)
