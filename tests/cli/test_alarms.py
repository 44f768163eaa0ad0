"""Alarms on the command line: exit codes, last lines, events, and a run that is killed for real."""

from __future__ import annotations

import json
import random

import pytest

from tests.cli.projects import change, etude, events, finished, process

ALARM = """

class AtEpoch(etude.Alarm):
    at: int

    def look(self, entry, earlier):
        if not isinstance(entry, etude.EpochEntry):
            return None
        return "this epoch is not to be trusted" if entry.epoch == self.at else ""
"""


def ring(project, action, at=1):
    """Have a project's run ring an alarm of its own."""
    agent = project / "agent.py"
    agent.write_text(agent.read_text() + ALARM)
    alarm = {"_type": "agent:AtEpoch", "at": at, "action": action}
    change(project / "config.yml", finetuning__alarms={"mine": alarm})


def test_a_paused_run_says_how_to_go_on_and_does(project):
    ring(project, "pause")
    shown = etude("train", "config.yml", "--name", "r")
    assert shown.exit_code == 3
    assert "warning: epoch 1: this epoch is not to be trusted" in shown.stdout
    assert shown.stderr.splitlines() == [
        "paused by an alarm: epoch 1: this epoch is not to be trusted",
        "to go on without this alarm: etude resume runs/r -o finetuning.alarms.mine.action=off",
        "next: etude resume runs/r",
    ]
    assert etude("resume", "runs/r").exit_code == 0
    assert json.loads((project / "runs/r/summary.json").read_text())["epochs_trained"] == 2


@pytest.mark.slow
def test_a_run_that_goes_back_is_the_same_when_it_is_killed_on_the_way(local):
    """Its weights too, and with them the optimiser's steps."""
    ring(local, "rollback", at=2)
    change(
        local / "config.yml",
        finetuning__deterministic=True,
        finetuning__num_epochs=3,
        trainer_adapters__local__lora={"r": 4},
        trainers={"epochs": {"_type": "epochs", "keep_checkpoints": "all"}},
    )
    whole = finished("train", "config.yml", "--name", "whole", "--json", folder=local)
    assert whole.returncode == 0, whole.stderr
    told = events(whole.stdout)
    (alarm,) = [number for number, event in enumerate(told) if event.get("alarm") == "mine"]
    assert told[alarm]["back_to"] in (0, 1)
    running = process("train", "config.yml", "--name", "killed", "--json", folder=local)
    assert running.stdout is not None
    for _ in range(random.Random(1).choice([alarm, alarm + 1])):
        running.stdout.readline()
    running.kill()
    running.communicate()
    last = finished("resume", "killed", "--json", folder=local)
    assert last.returncode == 0, last.stderr
    ends = [
        (local / "runs" / name / "summary.json").read_text().replace(f"runs/{name}/", "")
        for name in ("whole", "killed")
    ]
    one, other = ({**json.loads(end), "run_id": ""} for end in ends)
    assert one == other
    assert one["last_version"]["number"] == 3
