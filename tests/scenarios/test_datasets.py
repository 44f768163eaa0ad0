"""Programs from rows with the columns of APPS and of Buggy APPS."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from etude.core.errors import DatasetError, MissingExtraError
from etude.core.example import Example
from etude.scenarios.datasets import AppsConfig, BuggyAppsConfig, load_programs

APPS_ROW = {
    "problem_id": 7,
    "question": "Double a number.",
    "solutions": json.dumps(["print(2 * int(input()))", "n = int(input())\nprint(n + n)"]),
    "input_output": json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]}),
    "difficulty": "interview",
    "url": "https://example.com",
    "starter_code": "",
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


def test_apps_are_right_programs_the_first_of_each_problem(tmp_path: Path):
    file = write(tmp_path / "apps.jsonl", APPS_ROW, {**APPS_ROW, "problem_id": 8, "solutions": ""})
    first = Example("7-right-0", {"question": "Double a number.", "solution": "print(2 * int(input()))"}, 1)
    assert load_programs(AppsConfig(file_path=file)) == [first]
    both = load_programs(AppsConfig(file_path=file, solution_number=None))
    assert [example.id for example in both] == ["7-right-0", "7-right-1"]


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"split": "test"}, "no programs are left of 2 problems: 2 of split 'train', not 'test'"),
        ({"difficulty": "competition"}, "2 of difficulty 'interview', not 'competition'"),
        ({"solution_number": 9}, r"2 without a program number 9 \(`solution_number`\)"),
    ],
)
def test_where_nothing_is_left_it_says_what_was_asked_for(
    tmp_path: Path, keys: dict[str, Any], complaint: str
):
    file = write(tmp_path / "buggy.jsonl", BUGGY_ROW, {**BUGGY_ROW, "apps_problem_id": 13})
    with pytest.raises(DatasetError, match=complaint):
        load_programs(BuggyAppsConfig(file_path=file, **keys))


def test_where_all_is_flagged_it_says_so(tmp_path: Path):
    file = write(tmp_path / "buggy.jsonl", {**BUGGY_ROW, "flags": "bad_question"})
    with pytest.raises(DatasetError, match="1 problems: 1 flagged, and `exclude_flagged` is true"):
        load_programs(BuggyAppsConfig(file_path=file))


def test_buggy_apps_are_right_and_wrong_programs(tmp_path: Path):
    examples = load_programs(BuggyAppsConfig(file_path=write(tmp_path / "buggy.jsonl", BUGGY_ROW)))
    assert [(example.id, example.expected) for example in examples] == [("12-right-0", 1), ("12-wrong-0", 0)]
    assert examples[1].inputs == {"question": "Double a number.", "solution": "print(int(input()) ** 2)"}


def test_more_wrong_programs_than_right_ones_are_all_there(tmp_path: Path):
    row = {**BUGGY_ROW, "buggy_solutions": BUGGY_ROW["buggy_solutions"] * 3, "solutions": []}
    examples = load_programs(BuggyAppsConfig(file_path=write(tmp_path / "buggy.jsonl", row)))
    assert [example.id for example in examples] == ["12-wrong-0", "12-wrong-1", "12-wrong-2"]


def test_problems_are_chosen_by_difficulty_flag_and_split(tmp_path: Path):
    file = write(
        tmp_path / "buggy.jsonl",
        BUGGY_ROW,
        {**BUGGY_ROW, "apps_problem_id": 13, "difficulty": "competition"},
        {**BUGGY_ROW, "apps_problem_id": 14, "flags": "ambiguous"},
        {**BUGGY_ROW, "apps_problem_id": 15, "apps_split": "test"},
    )

    def chosen(**keys: Any) -> set[str]:
        examples = load_programs(BuggyAppsConfig.model_validate({"file_path": file} | keys))
        return {example.id.partition("-")[0] for example in examples}

    assert chosen() == {"12", "13", "15"}
    assert chosen(difficulty="competition") == {"13"}
    assert chosen(exclude_flagged=False) == {"12", "13", "14", "15"}
    assert chosen(split="test") == {"15"}


def test_shuffling_is_by_the_seed_and_before_the_limit(tmp_path: Path):
    rows = [{**BUGGY_ROW, "apps_problem_id": number} for number in range(20)]
    file = write(tmp_path / "buggy.jsonl", *rows)
    draws = [
        tuple(e.id for e in load_programs(BuggyAppsConfig(file_path=file, shuffle=True, seed=seed, limit=5)))
        for seed in (0, 0, 1)
    ]
    assert draws[0] == draws[1] != draws[2]
    assert len(draws[0]) == 5


@pytest.mark.parametrize("rows", [[APPS_ROW], [BUGGY_ROW]], ids=["apps", "buggy apps"])
def test_parquet_holds_the_same_as_json_lines(tmp_path: Path, rows: list[dict[str, Any]]):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    kept = [{key: value for key, value in row.items() if key != "buggy_solutions"} for row in rows]
    parquet.write_table(pyarrow.Table.from_pylist(kept), tmp_path / "rows.parquet")
    from_lines = load_programs(BuggyAppsConfig(file_path=write(tmp_path / "rows.jsonl", *kept)))
    assert load_programs(BuggyAppsConfig(file_path=tmp_path / "rows.parquet")) == from_lines


def test_the_hub_is_read_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "local").mkdir()
    write(tmp_path / "local" / "train.jsonl", APPS_ROW)
    (example,) = load_programs(AppsConfig(path=str(tmp_path / "local")))
    assert example.id == "7-right-0"


def test_a_dataset_that_is_a_script_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch):
    def load_dataset(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("Dataset scripts are no longer supported")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(DatasetError, match=r"no longer supported\. Name a copy of it in Parquet"):
        load_programs(AppsConfig())


def test_without_datasets_the_hub_needs_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*\[data\]"):
        load_programs(AppsConfig())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"question": None}, r"rows.jsonl:1: there is no text in column 'question'"),
        ({"problem_id": ...}, r"rows.jsonl:1: there is no id in column 'problem_id'"),
        ({"solutions": "[1"}, r"rows.jsonl:1: column 'solutions' is broken JSON"),
        ({"solutions": "3"}, r"rows.jsonl:1: column 'solutions' is no list of programs: 3"),
        ({"solutions": [{"code": "x"}]}, r"rows.jsonl:1: column 'solutions' holds something that is no prog"),
        ({"solutions": ""}, r"rows.jsonl: no programs are left of 1 problems"),
    ],
)
def test_rows_that_cannot_be_used_are_named(tmp_path: Path, change: dict[str, Any], complaint: str):
    row = {key: value for key, value in {**APPS_ROW, **change}.items() if value is not ...}
    with pytest.raises(DatasetError, match=complaint):
        load_programs(AppsConfig(file_path=write(tmp_path / "rows.jsonl", row)))


def test_ids_that_are_there_twice_are_named(tmp_path: Path):
    file = write(tmp_path / "rows.jsonl", BUGGY_ROW, BUGGY_ROW)
    with pytest.raises(
        DatasetError, match=r"rows.jsonl:2: problem id '12' is taken already by .*rows.jsonl:1"
    ):
        load_programs(BuggyAppsConfig(file_path=file))


def test_a_file_of_another_kind_or_without_splits_is_refused(tmp_path: Path):
    with pytest.raises(DatasetError, match=r"rows.csv: programs are read from .jsonl, .json, .parquet files"):
        load_programs(AppsConfig(file_path=tmp_path / "rows.csv"))
    file = write(tmp_path / "rows.jsonl", APPS_ROW)
    with pytest.raises(DatasetError, match="there is no column 'apps_split'; leave `split` out"):
        load_programs(AppsConfig(file_path=file, split="train"))
