"""Files of rows: what is odd in them is read, or refused with its place and what to do."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.config.data_files import read_csv, read_json_list, read_jsonl, read_parquet
from etude.core.errors import DatasetError
from etude.loop.arguments import dataset_config

BROKEN = {
    "a key twice": ('"q": 1, "q": 2', '"q" is given twice'),
    "beyond a float": ('"q": [1e999]', "too large .*float"),
    "another encoding": ('"q": "\udce4"', "byte 0xe4 .*UTF-8"),
}


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return path


@pytest.mark.parametrize("name", BROKEN)
def test_odd_json_is_refused_with_its_line(tmp_path: Path, name: str) -> None:
    content, problem = BROKEN[name]
    lines = write(tmp_path / "rows.jsonl", '{"id": 1}\n\n{"id": 2, ' + content + "}\n")
    with pytest.raises(DatasetError, match=rf"rows\.jsonl:3:?\d*: broken JSON: .*{problem}"):
        list(read_jsonl(lines))
    whole = write(tmp_path / "rows.json", '[{"id": 1},\n{"id": 2, ' + content + "}]")
    line = 2 if "too large" not in problem else 1  # It is found when all is read.
    with pytest.raises(DatasetError, match=rf"rows\.json:{line}:?\d*: broken JSON: .*{problem}"):
        list(read_json_list(whole))


def test_a_file_of_the_other_kind_is_refused_with_what_to_do(tmp_path: Path) -> None:
    for text in ('{\n  "id": 1\n}\n', '{"id": 1},\n{"id": 2}\n'):
        with pytest.raises(DatasetError, match=r"rows\.jsonl:1:\d+: .*one whole object"):
            list(read_jsonl(write(tmp_path / "rows.jsonl", text)))
    with pytest.raises(DatasetError, match=r"rows\.json:2:1: .*; .*one object .* jsonl"):
        list(read_json_list(write(tmp_path / "rows.json", '{"id": 1}\n{"id": 2}\n')))


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_what_is_whole_is_read_as_it_is(tmp_path: Path, mark: str) -> None:
    row = {"id": "ä", "big": 10**4000, "e": 1e300, "text": "1e999 and " + "9" * 400, "deep": [[[]]]}
    text = json.dumps(row)
    assert list(read_jsonl(write(tmp_path / "r.jsonl", f"{mark}{text}\r\n"))) == [
        (f"{tmp_path / 'r.jsonl'}:1", row)
    ]
    assert [*read_json_list(write(tmp_path / "r.json", f"{mark}[{text}]"))] == [
        (f"{tmp_path}/r.json: row 1", row)
    ]


def rows(path: Path, text: str) -> list[Any]:
    return [row for _, row in read_csv(write(path / "rows.csv", text))]


def test_a_csv_field_may_be_of_any_length(tmp_path: Path) -> None:
    assert rows(tmp_path, f"id,q\n1,{'x' * 200_000}\n") == [{"id": "1", "q": "x" * 200_000}]


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("id ,question\n1, a\n", {"id": "1", "question": "a"}),
        ("\ufeffid,q\n\n1,a\n", {"id": "1", "q": "a"}),
        ('id,q\r\n1,"a\nb"\r\n', {"id": "1", "q": "a\nb"}),
        ('id, q, answer\n1, "a, x", b\n', {"id": "1", "q": "a, x", "answer": "b"}),
        ('id,"q, r"\n1," a"\n', {"id": "1", "q, r": " a"}),
    ],
)
def test_blanks_around_csv_names_are_no_part_of_them(tmp_path: Path, text: str, row: Any) -> None:
    assert rows(tmp_path, text) == [row]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("id,answer,answer\n1,a,b\n", "rows.csv:1: two columns .*'answer'"),
        ("id, answer,answer \n1,a,b\n", "rows.csv:1: two columns .*'answer'"),
        ("id,,\n1,a,b\n", "rows.csv:1: two columns .*no name"),
        ("id,q\n1,a\n2,\udce4\n", "rows.csv:3: broken CSV: byte 0xe4 .*UTF-8"),
        ("id,q\n1,a,b\n", "rows.csv:2: .*more fields"),
        ('id,q\n1,"a" b\n', "rows.csv:2: broken CSV"),
    ],
)
def test_odd_csv_is_refused_with_its_line(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(DatasetError, match=problem):
        rows(tmp_path, text)


def test_parquet_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    columns = [pyarrow.array([1]), pyarrow.array(["a"]), pyarrow.array(["b"])]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(columns, names=["id", "q", "q"]), path)
    with pytest.raises(DatasetError, match=r"rows\.parquet: two columns .*'q'"):
        list(read_parquet(path))


@pytest.mark.parametrize("read", [read_json_list, read_jsonl, read_csv, read_parquet])
def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    with pytest.raises(DatasetError, match="/rows cannot be read: "):
        found = read(tmp_path / "rows")
        assert isinstance(found, Iterator) and list(found)


@pytest.mark.parametrize("ids", [(1, 1), (1, None)])
def test_rows_of_a_program_are_told_nothing_of_keys_that_they_have_not(ids):
    with pytest.raises(DatasetError, match="`id` out of") as raised:
        dataset_config([{"id": each, "question": "?"} for each in ids]).examples()
    assert "id_key" not in str(raised.value)
