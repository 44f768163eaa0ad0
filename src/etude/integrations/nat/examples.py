"""Examples from the toolkit's datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nat.data_models.dataset_handler import (
    EvalDatasetBaseConfig,
    EvalDatasetCsvConfig,
    EvalDatasetCustomConfig,
    EvalDatasetJsonConfig,
    EvalDatasetJsonlConfig,
    EvalDatasetParquetConfig,
    EvalDatasetXlsConfig,
)
from nat.data_models.evaluator import EvalInputItem
from nat.plugins.eval.dataset_handler.dataset_handler import DatasetHandler
from pydantic_core import to_jsonable_python

from etude.core.errors import DatasetError
from etude.core.example import Example
from etude.core.keys import content_hash

_BY_ENDING: dict[str, type[EvalDatasetBaseConfig]] = {
    ".json": EvalDatasetJsonConfig,
    ".jsonl": EvalDatasetJsonlConfig,
    ".csv": EvalDatasetCsvConfig,
    ".parquet": EvalDatasetParquetConfig,
    ".xls": EvalDatasetXlsConfig,
    ".xlsx": EvalDatasetXlsConfig,
}


class NatDataset:
    """The examples that the toolkit reads, by its own reader."""

    def __init__(self, general: Any, file: Path | None = None) -> None:
        """`general` is the toolkit's `eval.general`; `file` takes the place of its dataset's."""
        self._general = general
        self._file = file

    def examples(self) -> list[Example]:
        """All examples, in order. Raises DatasetError when they cannot be read, or two have one id."""
        config = self._config()
        handler = DatasetHandler(config, reps=1, concurrency=self._general.max_concurrency, num_passes=0)
        other = str(self._file) if self._file and isinstance(config, EvalDatasetCustomConfig) else None
        try:
            items = handler.get_eval_input_from_dataset(other).eval_input_items
        except Exception as error:
            raise DatasetError(f"{_source(config)} cannot be read by the toolkit: {error!r}") from error
        if not items:
            raise DatasetError(f"{_source(config)} holds no examples with a question")
        examples = [example_of(item) for item in items]
        if len({example.id for example in examples}) < len(examples):
            raise DatasetError(f"{_source(config)}: two rows have the same id in '{config.id_key}'")
        return examples

    def _config(self) -> EvalDatasetBaseConfig:
        """The dataset's config with the other file in it; the toolkit takes every such file for JSON."""
        config = self._general.dataset
        if self._file is None:
            if config is None:
                raise DatasetError("the config has no dataset; add `eval.general.dataset`, or give --dataset")
            return config
        if isinstance(config, EvalDatasetCustomConfig):
            return config
        kind = _BY_ENDING.get(self._file.suffix.lower(), type(config) if config else EvalDatasetJsonConfig)
        columns = config.model_dump(include={"id_key", "structure", "filter"}) if config else {}
        return kind(**columns, file_path=self._file)


def example_of(item: EvalInputItem) -> Example:
    """A row of the toolkit's. One without an id is called by its content."""
    row = to_jsonable_python(item.full_dataset_entry, fallback=str, inf_nan_mode="null")
    name = content_hash([item.input_obj, row]) if item.id in ("", None) else str(item.id)
    inputs = {"question": item.input_obj, "row": row}
    if item.expected_trajectory:
        inputs["expected_trajectory"] = item.expected_trajectory
    return Example(name, inputs, item.expected_output_obj)


def item_of(example: Example, output: Any, steps: Any) -> EvalInputItem:
    """The row that an example was made of, with what came of it."""
    return EvalInputItem(
        id=example.id,
        input_obj=example.inputs["question"],
        expected_output_obj=example.expected,
        output_obj=output,
        expected_trajectory=example.inputs.get("expected_trajectory", []),
        trajectory=steps,
        full_dataset_entry=example.inputs["row"],
    )


def _source(config: EvalDatasetBaseConfig) -> str:
    return f"the dataset {config.file_path}"
