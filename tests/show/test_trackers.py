"""The promises of every tracker: nothing is lost, and nobody waits for it."""

import json
from pathlib import Path
from typing import Any

import pytest

import etude as library
from etude.show import tracker
from etude.show.tracker import RunRecord
from etude.show.tracker_services import _require_server
from tests.cli.projects import change, etude, fail, run_to_end, succeed
from tests.json_server import JsonServer

KEYS = ["validation/00000000", "epoch/00000001", "epoch/00000002", "validation/00000002", "finished/00000002"]
"""The records of the small project's run, in their order."""

SHOWN = {"_type": "tests.show.tracker_parts:file_tracker", "file": "shown.jsonl"}


def read_lines(file: Path = Path("shown.jsonl")) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def records(file: Path = Path("shown.jsonl")) -> list[dict[str, Any]]:
    return [line for line in read_lines(file) if "key" in line]


def test_a_server_is_asked_whether_it_answers_without_the_password_of_its_address():
    heard: list[Any] = []
    with JsonServer(lambda path, headers, body: (heard.append(headers) or 200, {})) as server:
        _require_server(server.url.replace("//", "//me:canary-pw-1@"))
    assert [headers["authorization"] for headers in heard] == [None]


def test_a_run_is_shown_record_by_record_with_its_config_and_goes_on_so(project):
    change(project / "config.yml", report=[SHOWN])
    assert etude("train", "config.yml", "--name", "one").exit_code == 0
    assert [line["key"] for line in records()] == KEYS
    assert [line["number"] for line in records()] == [0, 1, 2, 3, 4]
    opened, *_, closed = read_lines()
    assert opened["config"]["finetuning"]["num_epochs"] == 2
    assert closed == {"close": "finished"}
    epoch = records()[1]
    history = json.loads(Path("runs/one/reward_history.json").read_text())
    for name in ("avg_reward", "reward_low", "reward_high"):
        assert epoch["metrics"][f"train/{name}"] == pytest.approx(history[0][name])
    assert epoch["metrics"]["learner/loss"] == 1.0
    assert epoch["metrics"]["train/tokens_per_second"] > 0
    assert epoch["metrics"]["cost/tokens"] > 0
    assert epoch["metrics"]["train/evaluators/brief/mean"] > 0
    # A run that goes on is shown under the same token, without what is there.
    assert etude("resume", "one", "-o", "finetuning.num_epochs=3").exit_code == 0
    keys = [line["key"] for line in records()]
    assert keys == [*KEYS, "epoch/00000003", "validation/00000003", "finished/00000003"]
    assert len({line["token"] for line in records()}) == 1
    assert [line["step"] for line in records()] == [0, 1, 2, 2, 2, 3, 3, 3]


@pytest.mark.parametrize(("text", "error"), [("", "ConnectionError"), ("exit", "SystemExit")])
def test_a_tracker_that_is_away_ends_no_run_and_gets_all_of_it_later(project, monkeypatch, text, error):
    monkeypatch.setattr(tracker, "PATIENCE", 0.1)
    change(project / "config.yml", report=[SHOWN])
    Path("shown.away").write_text(text)
    trained = succeed("train", "config.yml", "--name", "one")
    assert f"{error}: nobody is there" in trained.stdout
    assert "0 of 5 records" in trained.stdout and "etude resume" in trained.stdout
    Path("shown.away").unlink()
    monkeypatch.setattr(tracker, "PATIENCE", 30.0)
    for _ in range(2):
        assert "of 5 records" not in succeed("resume", "one").stdout
    assert [line["key"] for line in records()] == KEYS


@pytest.mark.parametrize(
    ("place", "again"),
    [
        ("after 2", KEYS[1:]),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("before 1", KEYS), ("before 4", KEYS[3:]), ("after 5", KEYS[4:]))
        ),
    ],
)
def test_a_run_that_is_killed_while_it_sends_has_every_record_there_at_least_once(project, place, again):
    change(project / "config.yml", report=[SHOWN | {"kill_at": place}])
    run_to_end("train", "config.yml", "--name", "one", folder=project, code=-9)
    before = [line["key"] for line in records()]
    succeed("resume", "one")
    assert [line["key"] for line in records()] == before + again
    assert [line["number"] for line in records()] == [KEYS.index(key) for key in before + again]


def test_functions_of_a_program_and_of_a_config_are_called_with_each_record(project):
    given: list[RunRecord] = []
    run = library.train(
        "config.yml", report=[given.append, "tests.show.tracker_parts:note"], name="one", progress=False
    )
    assert [record.key for record in given] == KEYS
    assert Path("noted.txt").read_text().split() == KEYS
    given.clear()
    library.resume(run, report=given.append, overrides=["finetuning.num_epochs=3"], progress=False)
    assert [record.kind for record in given] == ["epoch", "validation", "finished"]
    # It goes on without the function of its program too, and says what is missing.
    resumed = succeed("resume", "one", "-o", "finetuning.num_epochs=4")
    assert "etude.resume(" in resumed.stdout and "report=…)" in resumed.stdout


def test_an_evaluation_is_shown_too(project):
    change(project / "config.yml", report=[SHOWN])
    assert etude("evaluate", "config.yml", "--name", "scores").exit_code == 0
    (record,) = records()
    assert record["key"] == "evaluation"
    assert 0 <= record["metrics"]["evaluation/scores/correct/mean"] <= 1


def test_secrets_reach_no_tracker(project, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "sesame-opens-all")
    model = {"_type": "tests.cli.parts:open_scripted", "api_key": "${MY_API_KEY}"}
    rows = [{"id": f"t{n}", "question": "say sesame-opens-all", "answer": "yes"} for n in range(8)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    change(project / "config.yml", report=[SHOWN], llms={"policy": model})
    assert etude("train", "config.yml", "--name", "one").exit_code == 0
    assert len(records()) == 5
    assert "sesame-opens-all" not in Path("shown.jsonl").read_text()


@pytest.mark.parametrize(
    ("report", "words"),
    [
        ("tensorbord", "did you mean"),
        ({"_type": "wandb", "projct": "x"}, "project"),
        ({"_type": "function", "function": "tests.show.tracker_parts:none"}, "none"),
    ],
)
def test_a_wrong_entry_is_an_error_before_anything_is_sampled(project, report, words):
    change(project / "config.yml", report=report)
    refused = fail("train", "config.yml", "--name", "one")
    assert "report" in refused.stderr and words in refused.stderr
