"""Ctrl-C and SIGTERM: real processes, really stopped."""

import json
import signal

import pytest

from tests.cli.projects import change, etude, process, rows, run_to_end
from tests.support import one_quick


@pytest.mark.parametrize(("number", "code"), one_quick((signal.SIGINT, 130), (signal.SIGTERM, 143)))
def test_a_stopped_run_says_how_to_go_on(project, number, code):
    (project / "train.jsonl").write_text(rows(16, "t"))
    change(project / "config.yml", finetuning__num_epochs=1000, llms__policy__log=str(project / "log"))
    running = process("train", "config.yml", "--name", "r", "--json", folder=project)
    for line in running.stdout:
        if '"trained"' in line:
            break
    running.send_signal(number)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == code
    assert errors.startswith("stopped") and errors.split("\n", 1)[1] == "next: etude resume runs/r\n"
    done = len(json.loads(etude("runs", "show", "r", "--json").stdout)["history"]["epochs"])
    assert etude("resume", "-o", f"finetuning.num_epochs={done + 1}").exit_code == 0
    sampled = (project / "log").read_text().splitlines()
    assert len(set(sampled)) == len(sampled)


@pytest.mark.parametrize(
    "does", ["asyncio.get_running_loop().stop()", "[task.cancel() for task in asyncio.all_tasks()]"]
)
def test_an_agent_that_ends_the_run_is_named_as_the_cause(project, does):
    agent = (project / "agent.py").read_text()
    (project / "agent.py").write_text(
        "import asyncio\n" + agent.replace("reply = await", f"{does}\n    reply = await")
    )
    stopped = run_to_end("train", "config.yml", "--name", "r", folder=project, code=1)
    assert "event loop" in stopped.stderr
    assert "-o eval.general.isolation=process" in stopped.stderr
    assert "next: etude resume runs/r" in stopped.stderr
