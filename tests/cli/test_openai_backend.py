"""`etude check`, `train` and `resume` with training at OpenAI: a stand-in that speaks its wire format."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.store.outline import outlines
from etude.store.run_folder import RunFolder
from etude.store.sequences import trained_samples
from tests.backends.openai_stand_in import BASE, KEY, StandIn
from tests.cli.projects import change, etude, process, scripted_project


def says(model: str, number: int) -> str:
    """The base model is right half of the time, and what was fine-tuned always."""
    return "yes" if model != BASE or number % 2 else "no"


@pytest.fixture
def api() -> Iterator[tuple[StandIn, str]]:
    stand_in = StandIn(say=says)
    with stand_in.serve() as url:
        yield stand_in, url


@pytest.fixture
def hosted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, api: tuple[StandIn, str]) -> Path:
    """The current folder, with a config that samples and trains at the stand-in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_BASE_URL", api[1])
    config = scripted_project(tmp_path)
    change(
        config,
        llms={"policy": {"_type": "openai", "model_name": BASE, "max_tokens": 8, "retry_wait": 0}},
        trajectory_builders={"good": {"_type": "expert_iteration", "num_generations": 4, "min_reward": 1}},
        trainer_adapters={"openai": {"_type": "openai", "n_epochs": 2}},
        trainers={"epochs": {"_type": "epochs", "poll_interval": 0.001}},
    )
    return config


def made_by(job: dict[str, Any]) -> str:
    return str(job["fine_tuned_model"])


def test_a_run_makes_jobs_and_samples_from_the_models_that_they_make(hosted, api):
    stand_in, _ = api
    shown = etude("train", "config.yml", "--name", "r")
    assert shown.exit_code == 0, shown.stderr
    first, second = stand_in.jobs.values()
    assert (first["model"], second["model"]) == (BASE, "ft:gpt-4o-mini-2024-07-18:org::ftjob-0")
    assert [job["metadata"]["etude_version"] for job in (first, second)] == ["1", "2"]
    assert [row["messages"][-1]["content"] for row in stand_in.rows("ftjob-0")] == 16 * ["yes"]
    counts = [stand_in.sampled.count(model) for model in (BASE, *(made_by(job) for job in (first, second)))]
    assert counts == [6 + 32, 32, 6], "validation, an epoch, another one, and validation again"
    summary = json.loads(Path("runs/r/summary.json").read_text())
    assert (summary["before"]["avg_reward"], summary["after"]["avg_reward"]) == (0.5, 1.0)
    assert summary["last_version"]["location"] == second["fine_tuned_model"]
    events = [json.loads(line) for line in Path("runs/r/openai_jobs.jsonl").read_text().splitlines()]
    assert {event["run_id"] for event in events} == {"r-epoch-1", "r-epoch-2"}
    assert f"last version    v2  {second['fine_tuned_model']}" in shown.stdout
    first_rows = stand_in.rows("ftjob-0")
    with RunFolder.read(Path("runs/r")) as run:
        given = [
            sample
            for outline in outlines(run.journal, "train/1/", None)
            for sample in trained_samples(run.path, run.journal, outline.id, "train/1")
        ]
    assert sorted(map(str, (sample.messages for sample in given))) == sorted(
        str(tuple(row["messages"])) for row in first_rows
    )
    assert {sample.source.backend for sample in given} == {"openai"}
    jobs = json.loads(etude("jobs", "r", "--json").stdout)
    assert [job["metrics"]["train_loss"] for job in jobs] == [0.5, 0.5]


def test_what_a_run_made_can_be_evaluated_as_it_says(hosted, api):
    stand_in, _ = api
    shown = etude("train", "config.yml", "--name", "r")
    told = shown.stdout.rstrip().splitlines()[-1]
    assert told.startswith("next: etude evaluate runs/r/config.yml --model runs/r")
    assert etude("runs", "show", "r").stdout.rstrip().splitlines()[-1] == told
    shown = etude("evaluate", "runs/r/config.yml", "--model", "runs/r:v1", "--json")
    assert shown.exit_code == 0, shown.stderr
    assert set(stand_in.sampled[-6:]) == {"ft:gpt-4o-mini-2024-07-18:org::ftjob-0"}
    shown = etude("export", "r")
    assert shown.exit_code == 2
    assert "r:v2 is the model 'ft:gpt-4o-mini-2024-07-18:org::ftjob-1' of its backend" in shown.stderr


def test_a_run_that_lost_the_api_goes_on_with_the_job_that_is_there(hosted, api):
    stand_in, _ = api
    stand_in.faults["GET /fine_tuning/jobs/ID"] = [401]
    shown = etude("train", "config.yml", "--name", "r")
    assert shown.exit_code == 1
    assert "It goes on; resume (`etude resume`)" in shown.stderr
    sampled = len(stand_in.sampled)
    shown = etude("resume", "r")
    assert shown.exit_code == 0, shown.stderr
    assert (len(stand_in.jobs), stand_in.asked("POST /fine_tuning/jobs"), len(stand_in.files)) == (2, 2, 2)
    assert len(stand_in.sampled) == sampled + 32 + 6


def test_a_failed_job_is_made_again_under_another_name(hosted, api):
    stand_in, _ = api
    stand_in.ending = "failed"
    shown = etude("train", "config.yml", "--name", "r")
    assert shown.exit_code == 1
    assert "Code: invalid_training_file" in shown.stderr
    stand_in.ending = "succeeded"
    assert etude("resume", "r").exit_code == 0
    names = [job["metadata"]["etude_job"] for job in stand_in.jobs.values()]
    assert names == ["r-epoch-1", "r-epoch-1-retry-1", "r-epoch-2"]


def test_too_little_data_is_a_skip_that_says_so(hosted, api):
    stand_in, _ = api
    change(hosted, trajectory_builders__good__examples_per_epoch=2, finetuning__num_epochs=1)
    shown = etude("train", "config.yml", "--name", "r")
    assert shown.exit_code == 1
    assert "4 rows, and the API takes 10 or more" in shown.stderr
    assert stand_in.asked("POST /files") == 0


def test_a_check_says_what_it_would_cost_and_asks_nobody(hosted, api):
    stand_in, _ = api
    shown = etude("check", "config.yml", "--json")
    assert shown.exit_code == 0, shown.stdout
    estimate = json.loads(shown.stdout)["estimate"]
    # 64 episodes, gone over twice, of 200 + 4 tokens, at $3.
    assert estimate["training_usd"] == pytest.approx(64 * 2 * 204 * 3e-6)
    assert "at most about $0.08 for training" in etude("check", "config.yml").stdout
    assert stand_in.requests == []


WRONG = {
    "grpo": (
        {"trajectory_builders": {"grpo": {"_type": "grpo", "num_generations": 4}}},
        "the trainer adapter 'openai' can do: dpo, supervised",
    ),
    "another model": (
        {"llms": {"policy": {"_type": "tests.cli.parts:scripted"}}},
        "trains models of `_type: openai`, and llms.policy is `_type: scripted`",
    ),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("command", ["check", "train"])
def test_what_cannot_be_done_is_refused_before_any_call(hosted, api, case, command):
    changes, message = WRONG[case]
    change(hosted, **changes)
    shown = etude(command, "config.yml")
    assert shown.exit_code == 2
    assert message in shown.stdout + shown.stderr
    assert api[0].requests == []


def test_without_a_key_nothing_is_tried(hosted, api, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    shown = etude("check", "config.yml")
    assert shown.exit_code == 2
    assert "has no key for http://127.0.0.1" in shown.stdout
    assert api[0].requests == []


def test_with_a_grader_grpo_is_openais_reinforcement_fine_tuning(hosted, api):
    stand_in, _ = api
    grader = {"type": "string_check", "name": "same", "operation": "eq", "input": "{{sample.output_text}}"}
    change(
        hosted,
        trajectory_builders={"grpo": {"_type": "grpo", "num_generations": 4}},
        trainer_adapters__openai__reinforcement={"grader": {**grader, "reference": "{{item.expected}}"}},
        trainer_adapters__openai__min_rows=1,
        finetuning__num_epochs=1,
        eval__general__max_concurrency=1,
    )
    stand_in.min_rows = 1
    shown = etude("check", "config.yml")
    assert shown.exit_code == 0, shown.stdout
    assert "samples and grades by itself" in shown.stdout
    shown = etude("train", "config.yml", "--name", "r")
    assert shown.exit_code == 0, shown.stderr
    assert stand_in.jobs["ftjob-0"]["method"]["type"] == "reinforcement"
    row = stand_in.rows("ftjob-0")[0]
    assert (row["expected"], row["inputs"]) == ("yes", {"question": row["messages"][0]["content"]})


def test_the_key_is_in_no_file_and_no_output(hosted, api):
    change(hosted, trainer_adapters__openai__api_key="${OPENAI_API_KEY}")
    shown = etude("train", "config.yml", "--name", "r")
    assert shown.exit_code == 0, shown.stderr
    kept = [path.read_bytes() for path in Path("runs/r").rglob("*") if path.is_file()]
    for text in (shown.stdout.encode(), shown.stderr.encode(), *kept):
        assert KEY.encode() not in text


MOMENTS = ["POST /files", "POST /fine_tuning/jobs", "GET /fine_tuning/jobs/ID"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_that_is_killed_pays_once(hosted, api, moment):
    """Killed by SIGKILL after the API did what was asked, and before the answer came."""
    stand_in, _ = api
    change(hosted, finetuning__num_epochs=1, finetuning__run_configuration={})
    train = process("train", "config.yml", "--name", "r", folder=hosted.parent)
    stand_in.faults[moment] = [train.kill]
    train.communicate(timeout=120)
    assert train.returncode == -signal.SIGKILL
    sampled = len(stand_in.sampled)
    shown = etude("resume", "r")
    assert shown.exit_code == 0, shown.stderr
    assert (len(stand_in.files), len(stand_in.jobs), len(stand_in.sampled)) == (1, 1, sampled)


def test_a_run_that_is_killed_while_it_waits_for_another_day_goes_on(hosted, api):
    stand_in, _ = api
    stand_in.daily_limits = 1
    change(hosted, finetuning__num_epochs=1, finetuning__run_configuration={})
    train = process("train", "config.yml", "--name", "r", folder=hosted.parent)
    log = hosted.parent / "runs" / "r" / "openai_jobs.jsonl"
    while train.poll() is None and not (log.exists() and '"waiting"' in log.read_text()):
        time.sleep(0.05)
    train.kill()
    train.communicate(timeout=120)
    assert etude("resume", "r").exit_code == 0
    assert (len(stand_in.files), len(stand_in.jobs)) == (1, 1)


def test_a_check_warns_of_epochs_that_would_be_skipped(hosted):
    change(hosted, trajectory_builders__good__examples_per_epoch=2)
    shown = etude("check", "config.yml")
    assert shown.exit_code == 0
    assert "an epoch makes 8 rows at most, and jobs need 10" in shown.stdout
    assert shown.stdout.rstrip().splitlines()[-1] == "next: etude evaluate config.yml"


def test_several_models_can_be_trained_there(hosted, api):
    stand_in, _ = api
    two = {name: {"_type": "openai", "model_name": BASE, "retry_wait": 0} for name in ("one", "two")}
    (hosted.parent / "team.py").write_text(TEAM)
    change(hosted, llms=two, workflow="team:play", finetuning__targets={"one": {}, "two": {}})
    change(hosted, finetuning__num_epochs=1, eval__evaluators={"correct": "agent:correct"})
    shown = etude("check", "config.yml")
    assert shown.exit_code == 0, shown.stdout
    shown = etude("train", "config.yml", "--name", "r")
    assert shown.exit_code == 0, shown.stderr
    assert [job["metadata"]["etude_job"] for job in stand_in.jobs.values()] == [
        "r-epoch-1.one",
        "r-epoch-1.two",
    ]


TEAM = """
import etude


@etude.workflow
async def play(example: etude.Example, episode: etude.Episode) -> str:
    question = [{"role": "user", "content": example.inputs["question"]}]
    await episode.chat(question, model="one")
    return (await episode.chat(question, model="two")).text
"""


def test_a_key_that_is_withdrawn_stops_the_run_at_once_and_a_new_one_goes_on_with_it(hosted, api):
    """Half-way through the first epoch: what was answered is kept, and what was refused asked for again."""
    stand_in, _ = api
    stand_in.faults["POST /chat/completions"] = [None] * 20 + [401] * 1000
    shown = etude("train", "config.yml", "--name", "r")
    assert shown.exit_code == 1
    assert "HTTP 401" in shown.stderr and "check its `api_key`, or OPENAI_API_KEY" in shown.stderr
    assert shown.stderr.rstrip().splitlines()[-1] == "next: etude resume runs/r"
    assert 1000 - len(stand_in.faults.pop("POST /chat/completions")) <= 24
    shown = etude("resume", "r")
    assert shown.exit_code == 0, shown.stderr
    counts = [stand_in.sampled.count(model) for model in (BASE, *map(made_by, stand_in.jobs.values()))]
    assert counts == [6 + 32, 32, 6], "each call was answered once"
    history = [json.loads(line) for line in Path("runs/r/training_metrics.jsonl").read_text().splitlines()]
    assert [epoch["remote"]["retried"] for epoch in history] == [{}, {}]
