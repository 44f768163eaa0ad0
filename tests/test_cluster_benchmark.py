"""The benchmark that kills parts of runs sees what it is there to see."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from etude.core.call import Call, ChatRequest, Completion
from etude.store.encode import encode_call
from etude.store.journal import Journal

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def helper_call(key: int, completion: Completion | None) -> Any:
    request = ChatRequest(messages=({"role": "user", "content": "a?"},), key=key)
    return encode_call(Call(0, "", "helper", request, completion), None)


async def test_an_answer_counts_as_paid_from_its_commit_on(tmp_path: Path):
    paid = importlib.import_module("cluster_endpoint").Paid(tmp_path / "run.db")
    assert not paid.has(7)
    journal = Journal(tmp_path / "run.db")
    answer = Completion(message={"role": "assistant", "content": "b"})
    try:
        await journal.put("train/0/a/0/call/x", helper_call(8 << 32, None))
        assert not paid.has(8)  # It was asked for, and had no answer.
        await journal.put("train/0/a/0/call/y", helper_call(7 << 32, answer))
        assert paid.has(7)
        await journal.put("train/0/a/0/call/z", helper_call(9 << 32, answer))
        assert [paid.has(seed) for seed in (7, 8, 9)] == [True, False, True]
    finally:
        journal.close()


def test_two_journals_differ_where_a_step_does():
    project = importlib.import_module("cluster_project")
    whole = {"a": {"calls": [1, {"logprobs": [-1.0, -2.0]}]}, "b": 1, "c": 2}
    other = {"a": {"calls": [1, {"logprobs": [-1.0, -2.5]}]}, "b": 1, "d": 2}
    assert project.differences(whole, whole) == []
    assert project.differences(whole, other) == [
        "a: calls.1.logprobs.1 is -2.5 in place of -2.0",
        "c is missing",
        "d is there in addition",
    ]


def test_every_kind_is_killed_as_often_as_the_others_and_a_seed_repeats_the_series():
    kills = importlib.import_module("cluster_kills")

    def drawn(seed: int) -> list[str]:
        series = kills.Series(random.Random(seed), ["raylet", "runner", "head"])
        return [series.next() for _ in range(12)]

    assert {kind: drawn(1).count(kind) for kind in drawn(1)} == {"raylet": 4, "runner": 4, "head": 4}
    assert drawn(1) == drawn(1) != drawn(2)


def test_requests_for_committed_answers_are_counted(tmp_path: Path):
    chaos = importlib.import_module("cluster_chaos")
    lines = [{"at": 1.0, "seed": seed, "again": seed == 3, "by": "first"} for seed in range(5)]
    (tmp_path / "paid").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert chaos.paid_twice(tmp_path / "paid") == (1, 5)
