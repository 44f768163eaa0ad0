"""Programs from rows with the columns of Buggy APPS, and of APPS."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from etude.core.errors import DatasetError
from etude.scenarios.datasets import BuggyAppsConfig

APPS_ROW = {
    "problem_id": 7,
    "question": "Double a number.",
    "solutions": json.dumps(["print(2 * int(input()))", "n = int(input())\nprint(n + n)"]),
    "difficulty": "interview",
}
BUGGY_ROW = {
    "apps_split": "train",
    "apps_problem_id": 12,
    "difficulty": "interview",
    "question": "Double a number.",
    "solutions": [{"apps_solution_number": 0, "solution": "print(2 * int(input()))"}],
    "buggy_solutions": [{"apps_solution_number": 0, "solution": "print(int(input()) ** 2)", "checks": {}}],
    "flags": "",
}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_problem_is_an_example_for_each_right_and_each_wrong_program(tmp_path: Path):
    rows = BUGGY_ROW, {**BUGGY_ROW, "apps_problem_id": 13, "solutions": []}, APPS_ROW
    examples = BuggyAppsConfig(file_path=write(tmp_path / "buggy.jsonl", *rows)).examples()
    assert [(each.id, each.expected) for each in examples] == [
        ("12-right-0", 1), ("12-wrong-0", 0), ("13-wrong-0", 0), ("7-right-0", 1), ("7-right-1", 1),
    ]  # fmt: skip
    assert examples[1].inputs == {"question": "Double a number.", "solution": "print(int(input()) ** 2)"}


@pytest.mark.parametrize("rows", [[APPS_ROW], [BUGGY_ROW]], ids=["apps", "buggy apps"])
def test_parquet_holds_the_same_as_json_lines(tmp_path: Path, rows: list[dict[str, Any]]):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    kept = [{key: value for key, value in row.items() if key != "buggy_solutions"} for row in rows]
    parquet.write_table(pyarrow.Table.from_pylist(kept), tmp_path / "rows.parquet")
    from_lines = BuggyAppsConfig(file_path=write(tmp_path / "rows.jsonl", *kept)).examples()
    assert BuggyAppsConfig(file_path=tmp_path / "rows.parquet").examples() == from_lines


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"question": None}, r"rows.jsonl:1: there is no text in column 'question'"),
        ({"problem_id": ...}, r"rows.jsonl:1: .* no id in 'apps_problem_id'"),
        ({"solutions": "[1"}, r"rows.jsonl:1: column 'solutions' is broken JSON"),
        ({"solutions": "3"}, r"rows.jsonl:1: column 'solutions' is no list of programs: 3"),
        ({"solutions": [{"code": "x"}]}, r"rows.jsonl:1: column 'solutions' holds something that is no prog"),
        ({"solutions": ""}, r"rows.jsonl holds no programs"),
    ],
)
def test_rows_that_cannot_be_used_are_named(tmp_path: Path, change: dict[str, Any], complaint: str):
    row = {key: value for key, value in {**APPS_ROW, **change}.items() if value is not ...}
    with pytest.raises(DatasetError, match=complaint):
        BuggyAppsConfig(file_path=write(tmp_path / "rows.jsonl", row)).examples()
