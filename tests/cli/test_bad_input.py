"""Bad input, tried as a new user would: one clear sentence, the right exit code, nothing is lost."""

import json
import re
import resource
import shutil
import sqlite3
import sys
from pathlib import Path

import pytest

from tests.cli.projects import (
    change,
    etude,
    local_project,
    rows,
    run_to_end,
    scripted_project,
    started_anew,
    succeed,
)

WRONG, FAILED = 2, 1

PLAY = "async def play(example, episode):\n"
CORRECT = """
def correct(example, output):
    return 1.0


def brief(example, output):
    return 0.5


"""


def require_refusal(shown, code, *texts):
    """The command ended with `code`, and said all of the texts in a sentence, without a traceback."""
    told = shown.stderr
    assert (shown.exit_code if hasattr(shown, "exit_code") else shown.returncode) == code, told
    assert told.startswith("error: ")
    assert "Traceback" not in told
    assert [text for text in texts if not re.search(text, told)] == [], told


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["train", "confg.yml"], "confg.yml; did you mean config.yml"),
        (["train", "config.yml", "-o", "finetuning.num_epoch=3"], "-o finetuning.num_epoch: .*num_epochs"),
        (["train", "config.yml", "--name", "../up"], r"'\.\./up' cannot name"),
        (["check", "config.yml", "-o", "finetuning.output_dir=agent.py/runs"], "agent.py is a file"),
        (["evaluate", "config.yml", "-o", "eval.general.output_dir=agent.py"], "agent.py is a file"),
        (["train", "config.yml", "--dataset", "trian.jsonl"], "trian.jsonl .*train.jsonl"),
        (["train", "config.yml", "-o", "eval.general.dataset=trian"], "-o eval.general.dataset: there"),
        (["resume", "nothing"], "no run 'nothing'"),
        (["export", "train.jsonl"], "no run 'train.jsonl'"),
        (["init", "."], "already has agent.py, "),
    ],
)
def test_things_that_are_not_there(project, arguments, text):
    require_refusal(etude(*arguments), WRONG, text)


def test_datasets_that_are_no_use(project):
    told = r"train.jsonl:1:\d+: broken JSON"
    (project / "train.jsonl").write_text('{"id": "1", "question": "a"\n')
    require_refusal(etude("train", "config.yml"), WRONG, told)
    assert list((project / "runs").iterdir()) == []
    checked = etude("check", "config.yml")
    assert checked.exit_code == WRONG
    assert re.search(told, checked.stdout)


@pytest.mark.parametrize(
    ("code", "texts"),
    [
        (PLAY + "    raise ValueError('no idea')\n", [r"raised: 2", r"agent.py:\d+: ValueError: no idea"]),
        (
            "def play(example, episode):\n    import threading\n    threading.Event().wait()\n",
            [r"timeout: 2", "no output within 0.3 s"],
        ),
        (
            PLAY + "    return (await episode.chat([{'role': 'user', 'content': 'broken'}])).text\n",
            ["call_failed: 2", "the endpoint answered 500 five times"],
        ),
    ],
    ids=["raises", "never in a thread", "no answer"],
)
def test_agents_that_fail(project, code, texts):
    (project / "agent.py").write_text(CORRECT + code)
    if "timeout: 2" in texts:
        change(project / "config.yml", eval__general__timeout=0.3)
    shown = etude("train", "config.yml", "--name", "r")
    require_refusal(shown, FAILED, "error budget of 20 %", "next: etude resume runs/r", *texts)


ANSWER = PLAY + "    return (await episode.chat([{'role': 'user', 'content': 'q'}])).text\n\n\n"


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ("return float('nan')", [r"score:correct: 2", "nan"]),
        ("return output['score']", [r"agent.py:\d+: TypeError"]),
        ("import time; time.sleep(30)", ["longer than 0.3 s"]),
    ],
    ids=["nan", "raises", "never"],
)
def test_evaluators_that_fail_are_no_zero(project, body, texts):
    marked = f"@etude.evaluator(timeout=0.3)\ndef correct(example, output):\n    {body}\n\n\n"
    agent = f"import etude\n\n{ANSWER}{marked}def brief(*_):\n    return 1.0\n"
    (project / "agent.py").write_text(agent if "sleep" in body else agent.replace("0.3", "300"))
    change(project / "config.yml", llms__policy__log=str(project / "log"))
    shown = etude("train", "config.yml", "--name", "r")
    require_refusal(shown, FAILED, "no score from 'correct'", *texts)
    sampled = (project / "log").read_text().splitlines()
    mended = agent.replace(body, "return 1.0 if output == 'yes' else 0.0").replace("0.3", "300")
    (project / "agent.py").write_text(mended)
    del sys.modules["agent"]
    succeed("resume", "r")
    everything = (project / "log").read_text().splitlines()
    assert everything[: len(sampled)] == sampled
    assert len(set(everything)) == len(everything), "a paid call was made twice"


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("./bsae", "load the model '.*bsae': .*folder"),
        ("nobodys-model", "no folder 'nobodys-model' .*cache"),
        ("empty", "load the model '.*empty'"),
        ("models/tniy", "did you mean 'models/tiny'"),
    ],
)
def test_models_that_are_not_there(local, base, model, text):
    (local / "empty").mkdir()
    shutil.copytree(base, local / "models" / "tiny")
    change(local / "config.yml", llms__policy__model=model)
    require_refusal(etude("train", "config.yml"), WRONG, text)
    assert list((local / "runs").iterdir()) == []


def test_a_run_folder_of_another_version(project):
    for name in ("r", "s"):
        assert etude("evaluate", "config.yml", "--name", name).exit_code == 0
    with sqlite3.connect(project / "runs/r/run.db") as database:
        database.execute("PRAGMA user_version=99")
    require_refusal(etude("resume", "r"), FAILED, r"schema version 99.* version 5\..*environment\.json")
    assert etude("runs", "show", "r").exit_code == 1
    listed = json.loads(etude("runs", "list", "--json").stdout)
    assert {run["name"]: run["state"] for run in listed} == {"r": "unreadable", "s": "finished"}


@pytest.mark.slow
def test_without_torch(tmp_path, base):
    """As for a user who installed `etude` without the extra `local`."""
    blocked = ("torch", "transformers", "peft", "safetensors", "tokenizers", "accelerate")
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        f"import sys\nfor name in {blocked}:\n    sys.modules[name] = None\n"
    )
    local_project(tmp_path / "local", base)
    scripted_project(tmp_path / "other")
    path = {"PYTHONPATH": f"{hook}:{Path(__file__).parents[2]}:{Path(__file__).parents[2] / 'src'}"}
    shown = started_anew("train", "config.yml", folder=tmp_path / "local", environment=path)
    require_refusal(shown, WRONG, r"extra 'local'\. .*: pip install .*\[local\]")
    shown = started_anew("demo", "--out", "demo", folder=tmp_path, environment=path)
    require_refusal(shown, WRONG, r"pip install .*\[local\]")
    assert not (tmp_path / "demo").exists()
    shown = started_anew("train", "config.yml", folder=tmp_path / "other", environment=path)
    assert shown.returncode == 0, shown.stderr


@pytest.mark.slow
def test_a_limit_on_the_size_of_files_loses_nothing(tmp_path):
    config = scripted_project(tmp_path)
    (tmp_path / "train.jsonl").write_text(rows(60, "t"))
    change(config, llms__policy__log=str(tmp_path / "log"))

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (120_000, 120_000))

    shown = started_anew("train", "config.yml", "--name", "r", folder=tmp_path, preexec_fn=small_files)
    require_refusal(shown, FAILED, "disk", "free some space", "next: etude resume")
    kept = _calls(tmp_path / "runs" / "r")
    assert kept
    run_to_end("resume", "r", folder=tmp_path)
    assert kept <= _calls(tmp_path / "runs" / "r")
    sampled = (tmp_path / "log").read_text().splitlines()
    # Only what was on its way to the disk when it filled up was sampled again.
    assert len(sampled) - len(set(sampled)) <= 64


def _calls(run: Path) -> set[str]:
    with sqlite3.connect(run / "run.db") as database:
        return {key for (key,) in database.execute("SELECT key FROM steps WHERE key LIKE '%/call/%'")}
