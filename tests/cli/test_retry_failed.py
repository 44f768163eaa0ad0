"""`etude resume --retry-failed`: what was not the agent's fault is tried again, and nothing else."""

from __future__ import annotations

import json

import pytest

from tests.cli.projects import change, etude

AGENT = """
import asyncio, pathlib
import etude
from tests.support import pass_time

@etude.workflow(timeout=100)
async def play(example: etude.Example, episode: etude.Episode) -> str:
    with open("played", "a") as played:
        played.write(example.id + "\\n")
    if "lazy" in example.inputs["question"]:
        raise ValueError("no wish to work")
    if "slow" in example.inputs["question"]:
        pass_time(100)  # Of no other, as they are played one after the other.
        await asyncio.Event().wait()
    reply = await episode.chat([{"role": "user", "content": example.inputs["question"]}])
    return reply.text

@etude.evaluator
def correct(example: etude.Example, output: str) -> float:
    if pathlib.Path("judge is away").exists() and example.id == "t0":
        raise OSError("the judge does not answer")
    return float(output == example.expected)
"""


@pytest.fixture
def stopped(project, monkeypatch):
    """A run that stopped in its second epoch, with failures of every kind in both of its epochs."""
    (project / "agent.py").write_text(AGENT)
    questions = {"t0": "0?", "t1": "1?", "t2": "2?", "away": "broken?", "lazy": "lazy?", "slow": "slow?"}
    lines = [{"id": name, "question": text, "answer": "yes"} for name, text in questions.items()]
    (project / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (project / "judge is away").touch()
    change(
        project / "config.yml",
        eval__evaluators={"correct": "agent:correct"},
        eval__general__max_concurrency=1,
        finetuning__error_budget=1.0,
        llms__policy__log=str(project / "log"),
    )
    submit = __import__("tests.training", fromlist=["FakeAdapter"]).FakeAdapter.submit

    async def once(adapter, trajectories):
        if trajectories.run_id.endswith("-2"):
            raise RuntimeError("the backend is away")
        return await submit(adapter, trajectories)

    monkeypatch.setattr("tests.training.FakeAdapter.submit", once)
    shown = etude("train", "config.yml", "--name", "r")
    assert shown.exit_code == 1, shown.stdout
    monkeypatch.setattr("tests.training.FakeAdapter.submit", submit)
    (project / "judge is away").unlink()
    (project / "train.jsonl").write_text((project / "train.jsonl").read_text().replace("broken", "mended"))
    (project / "played").unlink()
    return project


def failures(project) -> dict[str, int]:
    epochs = [
        json.loads(line) for line in (project / "runs/r/training_metrics.jsonl").read_text().splitlines()
    ]
    return epochs[-1]["failures"]


def played(project) -> list[str]:
    """The training examples that an agent was run on since the run stopped."""
    file = project / "played"
    return [name for name in file.read_text().split() if name[0] != "v"] if file.exists() else []


def test_only_what_was_not_the_agents_fault_is_tried_again(stopped):
    shown = etude("resume", "r", "--retry-failed")
    assert shown.exit_code == 0, shown.stderr
    assert "to be tried again: 4 × call_failed, 4 × score:correct" in shown.stdout
    # The four episodes of the one example, in the epoch that was not finished.
    assert played(stopped) == ["away"] * 4
    assert failures(stopped) == {"raised": 4, "timeout": 4}


def test_without_it_the_failures_stay(stopped):
    assert etude("resume", "r").exit_code == 0
    assert played(stopped) == []
    assert failures(stopped) == {"call_failed": 4, "raised": 4, "timeout": 4, "score:correct": 4}
