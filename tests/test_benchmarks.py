"""Benchmarks can be started."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_one_side_of_the_whole_needs_no_other_flag(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr("whole.by_etude", vars)
    monkeypatch.setattr("whole.locate", str)
    monkeypatch.setattr("sys.argv", ["whole.py", "--side", "etude", "--quick"])
    importlib.import_module("whole").main()
    told = json.loads(capsys.readouterr().out)
    assert told["model"] and (told["task"], told["prompts"], told["group"]) == ("larger", 4, 4)


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_a_benchmark_can_be_imported(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # They are scripts, beside each other.
    importlib.import_module(name)
