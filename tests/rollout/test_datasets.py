import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etude.config.import_path import make_importable
from etude.core.episode import Example
from etude.core.errors import DatasetError, MissingExtraError
from etude.rollout.datasets import (
    CsvDatasetConfig,
    HuggingFaceDatasetConfig,
    JsonDatasetConfig,
    JsonlDatasetConfig,
    ParquetDatasetConfig,
    PythonDatasetConfig,
    RowsConfig,
    SeedsConfig,
)
from tests.rollout.running import write

ROWS = [{"id": "a", "question": "1+1?", "answer": "2"}, {"id": "b", "question": "2+2?", "answer": "4"}]
load_examples = RowsConfig.examples
EXAMPLES = [Example("a", {"question": "1+1?"}, "2"), Example("b", {"question": "2+2?"}, "4")]


def jsonl(folder: Path, rows: list[Any] = ROWS, **settings: Any) -> JsonlDatasetConfig:
    file = write(folder / "train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return JsonlDatasetConfig(file_path=file, **settings)


def as_json(folder: Path):
    return JsonDatasetConfig(file_path=write(folder / "train.json", json.dumps(ROWS)))


def as_csv(folder: Path):
    file = write(folder / "train.csv", 'id,question,answer\na,1+1?,2\nb,"2+2?",4\n')
    return CsvDatasetConfig(file_path=file)


def as_parquet(folder: Path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "train.parquet")
    return ParquetDatasetConfig(file_path=folder / "train.parquet")


def as_huggingface(folder: Path):
    (folder / "hub").mkdir()
    jsonl(folder / "hub")
    return HuggingFaceDatasetConfig(path=str(folder / "hub"))


def as_python(folder: Path):
    write(folder / "my_rows_module.py", f"def rows(last):\n    yield from {ROWS}[:last]\n")
    make_importable(folder)
    return PythonDatasetConfig(function="my_rows_module:rows", arguments={"last": 2})


@pytest.mark.parametrize("make", [jsonl, as_json, as_csv, as_parquet, as_huggingface, as_python])
def test_every_format_gives_the_same_examples(
    make: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    assert load_examples(make(tmp_path)) == EXAMPLES


def test_python_may_also_give_examples_or_be_an_iterable(tmp_path: Path) -> None:
    text = "from etude.core.episode import Example\nROWS = [Example('x', {'n': 1}), {'id': 'y', 'n': 2}]\n"
    write(tmp_path / "my_examples_module.py", text)
    make_importable(tmp_path)
    found = load_examples(PythonDatasetConfig(function="my_examples_module:ROWS"))
    assert found == [Example("x", {"n": 1}), Example("y", {"n": 2})]


def test_columns_are_mapped_as_asked(tmp_path: Path) -> None:
    rows = [{"key": 7, "prompt": "1+1?", "label": "2", "hint": "small", "expected": "no"}]
    config = jsonl(tmp_path, rows, id_key="key", expected="label", inputs=["prompt"])
    assert load_examples(config) == [Example("7", {"prompt": "1+1?"}, "2")]
    everything = jsonl(tmp_path, rows, id_key="key", expected="label")
    assert set(load_examples(everything)[0].inputs) == {"prompt", "hint", "expected"}


def test_a_column_that_is_not_there_names_the_row_and_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"train\.jsonl:1: .* 'anwser'; did you mean 'answer'"):
        load_examples(jsonl(tmp_path, expected="anwser"))
    with pytest.raises(DatasetError, match="no column 'text'"):
        load_examples(jsonl(tmp_path, inputs=["text"]))


def test_shuffling_comes_before_the_limit(tmp_path: Path) -> None:
    rows = [{"id": index} for index in range(50)]
    config = jsonl(tmp_path, rows, shuffle=True, limit=40)
    orders = [[example.id for example in load_examples(config)] for _ in range(2)]
    assert orders[0] == orders[1] and len(orders[0]) == 40
    assert any(int(name) >= 40 for name in orders[0])
    assert [example.id for example in load_examples(jsonl(tmp_path, rows, limit=2))] == ["0", "1"]


@pytest.mark.parametrize("row", [{"id;question": "?"}, {"id": None}, {"id": ""}])
def test_a_row_without_an_id_says_how_to_get_one(tmp_path: Path, row: dict[str, Any]) -> None:
    among = "" if "id" in row else " among id;question"
    with pytest.raises(DatasetError, match=rf"train\.jsonl:2: .* column 'id'{among}; .*`id_key: null`"):
        load_examples(jsonl(tmp_path, [{"id": 1}, row]))


def test_an_id_that_is_taken_names_both_rows(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"train\.jsonl:3: id '1' .* by .*train\.jsonl:1"):
        load_examples(jsonl(tmp_path, [{"id": 1}, {"id": 2}, {"id": "1"}]))


def test_ids_made_from_rows_are_stable_and_unique(tmp_path: Path) -> None:
    rows = [{"q": "a"}, {"q": "b"}, {"q": "a"}]
    first = [example.id for example in load_examples(jsonl(tmp_path, rows, id_key=None))]
    moved = [example.id for example in load_examples(jsonl(tmp_path, rows[::-1], id_key=None))]
    assert len(set(first)) == 3 and first[2] == f"{first[0]}-2"
    assert set(moved) == set(first)


@pytest.mark.parametrize(
    ("config_type", "text", "message"),
    [
        (JsonlDatasetConfig, '{"id": 1}\n[1]\n', r"rows:2: .* object .* found \[1\]"),
        (JsonDatasetConfig, '{"id": 1}', "rows: .* JSON .* list .* jsonl"),
        (JsonDatasetConfig, "[1]", "rows: row 1: .* object .* found 1"),
        (CsvDatasetConfig, "id,q\n1\n", "rows:2: .* fewer fields"),
        (ParquetDatasetConfig, "no parquet", "rows .* Parquet"),
    ],
)
def test_a_broken_row_is_named(tmp_path: Path, config_type: Any, text: str, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        load_examples(config_type(file_path=write(tmp_path / "rows", text)))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def rows():\n    return 3\n", ":rows' .* iterable .* found 3"),
        ("def rows():\n    return 'text'\n", ":rows' .* iterable .* found 'text'"),
        ("def rows():\n    yield {'id': 1}\n    yield 5\n", "row 2: .* object .* found 5"),
        (
            "def rows():\n    yield {'id': 1, 0: 'q'}\n",
            "row 1: a column is named 0; name each column with text",
        ),
        ("def rows():\n    yield 1 / 0\n", r"failed: .*broken_rows_\d\.py:2: ZeroDivisionError"),
    ],
)
def test_a_python_dataset_that_is_wrong_says_how(
    tmp_path: Path, body: str, message: str, request: pytest.FixtureRequest
) -> None:
    module = f"broken_rows_{len(body) % 10}"
    write(tmp_path / f"{module}.py", body)
    make_importable(tmp_path)
    with pytest.raises(DatasetError, match=message):
        load_examples(PythonDatasetConfig(function=f"{module}:rows"))


@pytest.mark.parametrize(("make", "module"), [(as_parquet, "pyarrow"), (as_huggingface, "datasets")])
def test_without_the_extra_it_is_named(
    make: Callable[[Path], Any], module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(MissingExtraError, match=r"pip install .*\[data\]"):
        load_examples(config)


def test_a_dataset_that_cannot_be_loaded_may_come_from_a_function(tmp_path: Path) -> None:
    write(tmp_path / "state.json", "{}")  # As `save_to_disk` writes it.
    with pytest.raises(DatasetError, match=r"load_from_disk.* `dataset: module:function`"):
        load_examples(HuggingFaceDatasetConfig(path=str(tmp_path)))


def seed_ids(**fields) -> list[str]:
    return [example.id for example in SeedsConfig(**fields).examples()]


def test_more_examples_begin_with_the_same_ones():
    assert seed_ids(size=50)[:10] == seed_ids(size=10)
    assert len(set(seed_ids(size=1000))) == 1000
    assert seed_ids(size=10) != seed_ids(size=10, seed=1)


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_no_split_has_an_example_of_the_other(seed: int):
    assert not {*seed_ids(size=2000)} & {*seed_ids(size=2000, seed=seed, split="validation")}


def test_an_example_is_its_seed_and_what_goes_with_it():
    (example,) = SeedsConfig(size=1, inputs={"level": 3}).examples()
    assert example.id == f"seed-{example.inputs['seed']}"
    assert example.inputs["level"] == 3 and 0 <= example.inputs["seed"] < 2**31
