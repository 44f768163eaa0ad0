"""The `next:` lines work, and the help: it answers at once, loads only what it needs, and is whole."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.cli.projects import change, etude, events, local_project, run_to_end, scripted_project, succeed
from tests.forked import programs
from tests.support import one_quick
from tests.test_architecture import loaded_after


def last_line(shown: Any) -> str:
    """The command that the last line offers."""
    line = (shown.stdout if shown.exit_code == 0 else shown.stderr).rstrip().splitlines()[-1]
    assert line.startswith("next: "), shown.stdout + shown.stderr
    return str(line.removeprefix("next: "))


def paste(line: str, folder: Path | None = None) -> str:
    """The output of a line that is pasted into a shell. It must succeed."""
    environment = {**os.environ, "PATH": os.pathsep.join([str(programs()), os.environ["PATH"]])}
    shell = ["bash", "--norc", "-c", line]
    done = subprocess.run(
        shell, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def works(shown: Any) -> str:
    """The output of the offered command, typed here."""
    return str(succeed(*shlex.split(last_line(shown))[1:]).stdout)


def test_after_a_stop(project):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.training.FakeAdapter.wait_until_complete", lambda *args, **kwargs: 1 / 0)
        stopped = etude("train", "config.yml", "--name", "r")
    assert stopped.exit_code == 1
    (job,) = json.loads(etude("jobs", "r", "--json").stdout)
    assert job["status"] == "interrupted", "nobody follows it"
    for shown in (etude("runs", "show", "r"), etude("jobs", "r"), stopped):
        assert last_line(shown) == "etude resume runs/r"
    works(stopped)


def test_after_a_run_of_local_weights(after_run):
    assert last_line(etude("runs", "show", "r")) == "etude export runs/r"
    assert "export/v" in works(etude("export", "r"))


def test_after_a_run_at_a_backend(project):
    shown = etude("train", "config.yml", "--name", "r")
    line = "etude evaluate runs/r/config.yml --model runs/r"
    assert last_line(etude("runs", "show", "r")) == last_line(shown) == line
    assert "r:v2" in works(shown)


def test_after_a_run_that_trained_on_nothing(project):
    agent = (project / "agent.py").read_text()
    (project / "agent.py").write_text(agent.replace("float(output == example.expected)", "0.5"))
    shown = etude("train", "config.yml", "--name", "r")
    assert shown.exit_code == 1
    lines = {last_line(each) for each in (shown, etude("resume", "r"), etude("runs", "show", "r"))}
    assert lines == {"etude episodes runs/r --phase train/2"}
    assert "episodes of train/2" in works(shown)


def test_after_a_check_an_evaluation_and_a_list(project):
    assert "epochs          3 trained" in works(etude("check", "config.yml", "-o", "finetuning.num_epochs=3"))
    assert "scored" in works(etude("evaluate", "config.yml", "--name", "e"))
    assert "reward" in works(etude("episodes", "e"))
    assert "state           finished" in works(etude("runs", "list"))


def test_after_a_log_was_imported(project):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    Path("log.jsonl").write_text(json.dumps({"messages": messages}), encoding="utf-8")
    shown = etude("import-traces", "log.jsonl", "--name", "chats")
    assert "Hello" in works(shown) and "Hello" in works(etude("runs", "show", "chats"))


def test_after_a_look_at_a_damaged_run(project):
    assert etude("train", "config.yml", "--name", "r").exit_code == 0
    (project / "runs/r/storage.json").write_text("[broken")
    assert last_line(etude("runs", "show", "r")) == "etude runs check runs/r"
    assert "storage.json: cannot be read" in etude("runs", "check", "runs/r").stderr


def test_after_the_skill_was_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "wrote my_agent/agent.py" in paste(last_line(etude("skill")))
    text = Path(".claude/skills/etude/SKILL.md").read_text(encoding="utf-8")
    front = yaml.safe_load(text.split("---")[1])
    assert front["name"] == "etude" and len(front["description"]) < 1024 and text.count("\n") <= 120
    assert etude("skill").exit_code == 2, "a skill that somebody has changed stays"
    assert Path(json.loads(etude("skill", "--to", "x", "--json").stdout)["file"]).read_text("utf-8") == text


def test_where_nothing_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert last_line(etude("runs", "list")) == "etude init my_agent"


def test_a_secret_that_was_typed_is_not_printed(project):
    shown = etude("check", "config.yml", "-o", "llms.policy.api_key=sk-1", "-o", "finetuning.seed=2")
    assert "sk-1" not in shown.stdout
    assert last_line(shown) == "etude train config.yml -o llms.policy.api_key=********** -o finetuning.seed=2"


HARD = 'it\'s a "项目" $HOME & (co); #1'
"""A name that a shell would take apart in many ways."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["scripted", "local"])
def test_hard_names_and_folders_elsewhere(tmp_path, monkeypatch, base, kind):
    """The project, its config and the runs all lie elsewhere and have hard names."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    project = tmp_path / HARD
    made = scripted_project(project) if kind == "scripted" else local_project(project, base)
    config = made.rename(project / f"-{HARD}.yml")
    runs = tmp_path / f"runs of {HARD}"
    change(config, finetuning__num_epochs=1, finetuning__output_dir=str(runs))
    stdout = paste(last_line(etude("check", config)), here)
    paste(stdout.rstrip().splitlines()[-1].removeprefix("next: "), here)
    assert etude("train", config, "--name", HARD).exit_code == 0
    for command in (["runs", "list"], ["runs", "show", HARD], ["jobs", HARD], ["episodes", HARD]):
        paste(last_line(etude(*command, "--output-dir", runs)), here)
    # Typed in the project itself, where the config begins like an option.
    monkeypatch.chdir(project)
    shutil.rmtree(runs)
    paste(last_line(etude("check", f"./-{HARD}.yml")), project)


HEAVY = {"torch", "transformers", "numpy", "openai", "pydantic", "matplotlib", "sqlalchemy", "rich", "yaml"}


def test_help_loads_nothing_heavy():
    code = "from etude.cli import main\nsys.argv = ['etude', '{}']\ntry: main()\nexcept SystemExit: pass"
    assert not set.union(*loaded_after(code.format("--help"), code.format("--version"))) & HEAVY


def test_in_a_pipe_each_row_is_a_line(project, monkeypatch):
    name = "a-long-name-of-a-run-that-nobody-would-like-to-type-again-项目"
    monkeypatch.setenv("COLUMNS", "")
    assert etude("train", "config.yml", "--name", name).exit_code == 0
    listed = etude("runs", "list").stdout.splitlines()
    (row,) = [line for line in listed if name in line and "next: " not in line]
    assert "train" in row and "finished" in row and "2/2" in row
    jobs = etude("jobs", name).stdout.splitlines()
    assert sum("completed" in line and f"{name}-epoch-" in line for line in jobs) == 2


def test_the_link_that_is_printed_opens_the_run(project):
    assert etude("evaluate", "config.yml", "--name", "e").exit_code == 0
    command = [programs() / "etude", "view", "e", "--port", "0"]
    with subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, text=True) as view:
        link = next(found[0] for line in view.stdout if (found := re.search(r"http\S+", line)))
        with httpx.Client(follow_redirects=True, timeout=60) as browser:
            page = browser.get(link)
        view.send_signal(signal.SIGINT)
        view.wait(60)
    assert page.status_code == 200 and str(page.url).endswith("/runs/e") and "<h1>e</h1>" in page.text


LOGGING = """
import logging

import httpx

log = logging.getLogger("agent")


async def play(example, episode):
    log.info("asking about %s", example.id)
    log.debug("in detail")
    transport = httpx.MockTransport(lambda request: httpx.Response(204))
    async with httpx.AsyncClient(transport=transport) as client:
        await client.get("http://elsewhere")
    return (await episode.chat([{"role": "user", "content": example.inputs["question"]}])).text


def correct(example, output):
    logging.info("scoring")
    return float(output == "yes")


def brief(example, output):
    return 0.5
"""


@pytest.fixture
def talking(project: Path) -> Path:
    (project / "agent.py").write_text(LOGGING)
    return project


def test_what_the_agent_logs_is_shown_with_the_time_and_a_librarys_chatter_is_not(talking: Path):
    shown = run_to_end("evaluate", "config.yml", "--json", folder=talking)
    assert [len(event) > 0 for event in events(shown.stdout)] == [True], "standard output is JSON alone"
    lines = [line.split(" ", 2) for line in shown.stderr.splitlines() if " INFO " in line]
    assert {line[2] for line in lines} >= {"INFO agent: asking about v0", "INFO root: scoring"}
    assert all(len(date) == 10 and len(time) == 12 for date, time, _ in lines)
    assert "in detail" not in shown.stderr and "elsewhere" not in shown.stderr


@pytest.mark.parametrize("place", one_quick(0, 2))
def test_debug_may_stand_anywhere_on_the_line(talking: Path, place: int):
    words = ["evaluate", "config.yml"]
    shown = succeed(*words[:place], "--debug", *words[place:])
    assert " DEBUG agent: " in shown.stderr and "elsewhere" not in shown.stderr
