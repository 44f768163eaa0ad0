"""Runs on a cluster that are killed and resumed, with learners or runners on its nodes; a server's jobs."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from etude.models.policy import WEIGHTS_FILE, Policy
from etude.models.weights import load_tensors
from tests.cli.conftest import base as base
from tests.cli.killed import everything, killed_after, repeatable_project
from tests.cli.projects import change, events, run_to_end
from tests.learner.test_team import SOURCE, assert_near
from tests.models.tiny_models import fresh_policy
from tests.processes.cluster_jobs import newest_step
from tests.server.process import ServerProcess
from tests.server.test_crash import LONG
from tests.server.test_engine import kill_a_rank

pytestmark = pytest.mark.cluster

AGENT = """
import etude

class Halved(etude.Grpo, name="halved"):
    # An algorithm of one's own, in a module beside the config.
    def advantages(self, group):
        return [[value / 2 for value in values] for values in super().advantages(group)]

@etude.workflow
async def play(example, episode):
    return (await episode.chat([{"role": "user", "content": example.inputs["question"]}])).text

@etude.evaluator
def vary(example, output):
    return len(set(output)) / 16
"""

CONFIG = """
llms: {policy: {_type: local, model: model, max_tokens: 12, device: cpu}}
workflow: agent_of_mine:play
eval:
  general: {dataset: train.json}
  evaluators: {varied: agent_of_mine:vary}
trajectory_builders: {mine: {_type: "agent_of_mine:Halved", num_generations: 4}}
trainer_adapters:
  local: {_type: local, learning_rate: 0.001, batch_size: 4, passes: 30, checkpoint_steps: 5}
finetuning: {enabled: true, num_epochs: 1, deterministic: true, seed: 7}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a config, an agent and a model."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "agent_of_mine.py").write_text(AGENT)
    (folder / "config.yml").write_text(CONFIG)
    rows = [{"id": f"e{number}", "question": f"what is {number} plus 1?"} for number in range(3)]
    (folder / "train.json").write_text(json.dumps(rows))
    fresh_policy(max_context=128).export(folder / "model")
    return folder


def etude(project: Path, *arguments: str) -> subprocess.Popen[str]:
    """The command, started above the project: its modules come to the nodes by the cluster alone."""
    return subprocess.Popen(
        [sys.executable, "-m", "etude", *arguments],
        cwd=project.parent,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(SOURCE), str(SOURCE / "src")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait(process: subprocess.Popen[str]) -> str:
    """Wait for a command that is to succeed; its output."""
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output[-5000:]
    return output


def weights(run: Path) -> dict[str, Any]:
    """Of the run's last version."""
    return load_tensors(run / "checkpoints" / "v1" / WEIGHTS_FILE)


def test_a_run_whose_process_is_killed_goes_on_from_the_checkpoint_of_its_learners(
    cluster: Any, project: Path
) -> None:
    runs, config = project.parent / "runs", str(project / "config.yml")
    wait(etude(project, "train", config, "--name", "here"))
    on = [
        f"cluster.address={cluster.address}",
        "cluster._type=ray",
        "cluster.runners=0",
        "cluster.learners=2",
    ]
    block = [part for option in on for part in ("-o", option)]
    there = etude(project, "train", config, "--name", "there", *block)
    end = time.monotonic() + 200
    while newest_step(runs / "there" / "learners") < 10:
        assert time.monotonic() < end and there.poll() is None, there.communicate()
        time.sleep(0.05)
    there.send_signal(signal.SIGKILL)
    there.communicate()
    assert not (runs / "there" / "checkpoints" / "v1").exists()
    step = newest_step(runs / "there" / "learners")
    wait(etude(project, "resume", str(runs / "there")))
    log = (runs / "there" / "learners" / "learners.log").read_text()
    begins = [int(steps) for steps in re.findall(r"begins after (\d+) steps", log)]
    assert begins[-1] >= step >= 10  # What the first learners logged may have died with the run's process.
    start = Policy.load(project / "model", device="cpu").copy_tensors()
    assert_near(weights(runs / "there"), weights(runs / "here"), start)


HERE = ("-o", "cluster=null")


@pytest.fixture
def deterministic_project(tmp_path: Path, base: Path) -> Path:
    return repeatable_project(tmp_path, base)


def whole(deterministic_project: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """How many events a run has that nothing happens to, and all that it keeps."""
    command = ("train", "config.yml", "--name", "run", "-o", "storage=null", *options, "--json")
    run = run_to_end(*command, folder=deterministic_project)
    kept = everything(deterministic_project / "runs" / "run")
    shutil.rmtree(deterministic_project / "runs")
    return len(events(run.stdout)), kept


def differences(expected: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    """The steps that are not the same, as they should be and as they are."""
    keys = expected.keys() | kept.keys()
    return {key: (expected.get(key), kept.get(key)) for key in keys if expected.get(key) != kept.get(key)}


@pytest.mark.parametrize("ahead", [False, True], ids=["now", "ahead"])
@pytest.mark.parametrize("begins", ["here", "there"])
def test_a_run_that_is_killed_again_and_again_goes_on_with_and_without_the_cluster(
    deterministic_project: Path, cluster: Any, begins: str, ahead: bool
) -> None:
    change(deterministic_project / "config.yml", finetuning__collect_ahead=ahead)
    count, expected = whole(deterministic_project)
    there = ("--on", cluster.address)
    places = [(), there] if begins == "here" else [there, HERE]
    command, choice = ("train", "config.yml", "--name", "run", "-o", "storage=null"), random.Random(begins)
    for number in range(4):
        seconds, seen = choice.random() * 0.2, choice.randint(2, count // 2)
        if not killed_after(
            seen, *command, *places[number % 2], folder=deterministic_project, seconds=seconds
        ):
            break
        command, places = ("resume", "run"), [there, HERE] if begins == "there" else [HERE, there]
    run_to_end("resume", "run", *there, "--json", folder=deterministic_project)
    assert differences(expected, everything(deterministic_project / "runs" / "run")) == {}


def test_two_nodes_train_a_job_of_a_server_and_survive_kill_9(
    cluster: Any, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """That they learn what one process does is in `test_local_learners.py`."""
    options = ("--checkpoint-steps", "5", "--device", "cpu", "--training-processes", "2")
    folder = tmp_path_factory.mktemp("two")
    with ServerProcess(model, folder, *options, "--on", cluster.address) as running:
        kill_a_rank(running, 1, LONG)
