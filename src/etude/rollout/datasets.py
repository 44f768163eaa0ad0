"""Datasets: rows from files, the hub or Python, and the examples made from them."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from etude.config.component import DatasetConfig
from etude.config.data_files import PlacedRow, read_csv, read_json_list, read_jsonl, read_parquet
from etude.config.import_path import import_object, user_code
from etude.config.registry import config_factory, register_dataset
from etude.core.episode import Example
from etude.core.errors import DatasetError, MissingExtraError, alternatives, nearest
from etude.core.keys import content_hash, generator


class RowsConfig(DatasetConfig):
    """Options of all dataset types: how columns are used, and how many rows."""

    source_key: ClassVar[str]
    """The option that names the source of the rows, for errors."""

    id_advice: ClassVar[str] = (
        "name another column with `id_key`, or set `id_key: null` to make ids from the rows"
    )
    """The advice for rows without ids of their own."""

    id_key: str | None = "id"
    """Name the column with each row's id. Set null to make a stable id from each row's content."""
    inputs: list[str] | None = None
    """Name the columns that the agent is given; default: all except id and expected answer."""
    expected: str | None = None
    """Name the column of the expected answer; default: `expected`, or else `answer`."""
    limit: int | None = Field(default=None, ge=1)
    """Use at most this many rows."""
    shuffle: bool = False
    """Shuffle the rows before `limit` is applied."""

    def _rows(self) -> Iterator[PlacedRow]:
        """Yield the content of each row with its place."""
        rows = enumerate(self._contents(), start=1)
        return ((f"{getattr(self, self.source_key)}: row {number}", row) for number, row in rows)

    def _contents(self) -> Iterable[Any]:
        raise DatasetError(f"dataset type '{self.type_name}' has no reader")

    def examples(self) -> list[Example]:
        """Return the examples in the order of the rows, or shuffled if the config says so.

        Raises DatasetError for a missing, broken or empty dataset, a missing column, and a missing or
        repeated id; the message names the row. Equal rows without ids are numbered. Raises MissingExtraError
        if the libraries that read it are not installed.
        """
        examples: list[Example] = []
        first: dict[str, str] = {}
        count: Counter[str] = Counter()
        for where, row in self._rows():
            example = _example(self, where, row)
            count[example.id] += 1
            if example.id in first and self.id_key is None:
                example = replace(example, id=f"{example.id}-{count[example.id]}")
            if example.id in first:
                raise DatasetError(
                    f"{where}: id '{example.id}' is already taken by {first[example.id]}; "
                    f"make ids unique, or {self.id_advice}"
                )
            first[example.id] = where
            examples.append(example)
        if not examples:
            raise DatasetError(f"{getattr(self, self.source_key)} holds no examples")
        if self.shuffle:
            generator(0, "dataset").shuffle(examples)
        return examples[: self.limit]


class FileDatasetConfig(RowsConfig):
    """A dataset in one file."""

    source_key = "file_path"

    file_path: Path
    """Set the path of the file."""

    def _rows(self) -> Iterator[PlacedRow]:
        path = self.file_path
        if path.is_file():
            return _READERS[self.type_name](path)
        others = path.parent.iterdir() if path.parent.is_dir() else ()
        close = nearest(path.name, (file.name for file in others if file.is_file()))
        hint = f"; did you mean '{path.parent / close}'?" if close else ""
        problem = "is not a file" if path.exists() else "does not exist"
        raise DatasetError(f"dataset file {path} {problem}{hint}")


_READERS: Mapping[str, Callable[[Path], Iterator[PlacedRow]]] = {
    "json": read_json_list,
    "jsonl": read_jsonl,
    "csv": read_csv,
    "parquet": read_parquet,
}
"""Readers by dataset type. They raise DatasetError for a file that is not UTF-8 or not readable."""


class JsonDatasetConfig(FileDatasetConfig, name="json"):
    """A JSON file: a list of objects."""


class JsonlDatasetConfig(FileDatasetConfig, name="jsonl"):
    """A JSON Lines file: one object per line."""


class CsvDatasetConfig(FileDatasetConfig, name="csv"):
    """A CSV file whose first line names the columns. All values are text."""


class ParquetDatasetConfig(FileDatasetConfig, name="parquet"):
    """A Parquet file. Needs the extra `data`."""


class HuggingFaceDatasetConfig(RowsConfig, name="huggingface"):
    """A dataset on the Hugging Face hub, or in a local folder. Needs the extra `data`."""

    source_key = "path"

    path: str
    """Set a name on the hub, or a folder."""
    subset: str | None = None
    """Choose the dataset's configuration, if it has several."""
    split: str = "train"
    """Choose the split. Slices such as `train[:100]` work."""
    revision: str | None = None
    """Choose the version on the hub."""

    def _contents(self) -> Iterable[Any]:
        try:
            import datasets
        except ImportError as error:
            raise MissingExtraError("reading Hugging Face datasets", "data") from error
        options = {"split": self.split, "revision": self.revision}
        try:
            return datasets.load_dataset(self.path, self.subset, **options)  # type: ignore[no-any-return]
        except (OSError, ValueError) as error:
            problem = f"the dataset '{self.path}' (split {self.split}) cannot be loaded: {error}".rstrip(".")
            raise DatasetError(f"{problem}; or load it in a function, `dataset: module:function`") from error


class PythonDatasetConfig(RowsConfig, name="python"):
    """Rows from a Python function, or from any iterable of dicts or Examples."""

    source_key = "function"

    function: str
    """Set `package.module:name` of the function or iterable."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Set keyword arguments for the function."""

    def _contents(self) -> Iterator[Any]:
        origin = import_object(self.function)
        with user_code(DatasetError, f"'{self.function}' failed"):
            rows = origin(**self.arguments) if callable(origin) else origin
            if isinstance(rows, Mapping | str) or not isinstance(rows, Iterable):
                raise DatasetError(
                    f"'{self.function}' must return an iterable of dicts or Examples, found {rows!r:.80}"
                )
            yield from rows


def _example(config: RowsConfig, where: str, row: Any) -> Example:
    if isinstance(row, Example):
        return row
    if not isinstance(row, Mapping):
        raise DatasetError(f"{where}: a row must be an object with named columns, found {row!r:.80}")
    columns = dict(row)
    if (odd := next((name for name in columns if not isinstance(name, str)), None)) is not None:
        raise DatasetError(f"{where}: a column is named {odd!r:.80}; name each column with text")

    def value(name: str) -> Any:
        if name not in columns:
            raise DatasetError(f"{where}: there is no column '{name}'" + alternatives(name, columns))
        return columns[name]

    key, expected = config.id_key, config.expected
    if expected is None:
        expected = next((name for name in ("expected", "answer") if name in columns), None)
    answer = None if expected is None else value(expected)
    names = config.inputs if config.inputs is not None else [n for n in columns if n not in (expected, key)]
    inputs = {name: value(name) for name in names}
    named = None if key is None else columns.get(key)
    if key is not None and (named is None or named == "" or named != named):
        what = f"id in column '{key}'" if key in columns else f"column '{key}' among {', '.join(columns)}"
        raise DatasetError(f"{where}: there is no {what}; {config.id_advice}")
    try:
        return Example(content_hash(columns) if key is None else str(named), inputs, answer)
    except (TypeError, ValueError, RecursionError) as error:
        raise DatasetError(f"{where}: no id can be made from this row: {error}") from error


class SeedsConfig(DatasetConfig, name="seeds"):
    """Examples that are a seed each, for environments that make a task from a seed. A larger `size` begins
    with the same examples. The two splits never share one, whatever their `seed`."""

    size: int = Field(default=256, ge=1, le=2**20)
    """Set the number of examples."""
    seed: int = Field(default=0, ge=0)
    """Set another seed to draw other examples."""
    split: Literal["train", "validation"] = "train"
    """Choose the split: training takes even numbers, validation odd ones."""
    inputs: dict[str, Any] = Field(default_factory=dict)
    """Add further inputs, the same in each example."""

    def examples(self) -> list[Example]:
        """Return the examples. The id is `seed-` and the number below 2**31 that is the input `seed`."""
        draw, numbers = generator(self.seed, "seeds", self.split), dict[int, None]()
        while len(numbers) < self.size:
            numbers[2 * draw.getrandbits(30) + (self.split == "validation")] = None
        return [Example(f"seed-{number}", {**self.inputs, "seed": number}) for number in numbers]


dataset = config_factory(lambda config: config)
"""Yields the config itself: all shipped dataset types make their own examples."""

register_dataset(config_type=JsonDatasetConfig)(dataset)
register_dataset(config_type=JsonlDatasetConfig)(dataset)
register_dataset(config_type=CsvDatasetConfig)(dataset)
register_dataset(config_type=ParquetDatasetConfig)(dataset)
register_dataset(config_type=HuggingFaceDatasetConfig)(dataset)
register_dataset(config_type=PythonDatasetConfig)(dataset)
register_dataset(config_type=SeedsConfig)(dataset)
