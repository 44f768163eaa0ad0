"""Bad input, tried as a new user would: one clear sentence, the right exit code, nothing is lost."""

from __future__ import annotations

import json
import re
import resource
import shutil
import sqlite3
import subprocess
from pathlib import Path

import pytest

from tests.cli.projects import change, etude, finished, local_project, rows, scripted_project, started_anew

WRONG, FAILED = 2, 1

PLAY = "async def play(example, episode):\n"
CORRECT = """
def correct(example, output):
    return 1.0


def brief(example, output):
    return 0.5


"""


def refused(shown, code, *texts):
    """The command ended with `code`, and said all of the texts in a sentence, without a traceback."""
    told = shown.stderr
    assert (shown.exit_code if hasattr(shown, "exit_code") else shown.returncode) == code, told
    assert told.startswith("error: ")
    assert "Traceback" not in told
    assert [text for text in texts if not re.search(text, told)] == [], told


@pytest.mark.parametrize("command", ["train", "check", "evaluate"])
@pytest.mark.parametrize(
    ("keys", "texts"),
    [
        (
            {"finetuning__num_epoch": 3},
            [r"config.yml:\d+:3: key 'finetuning.num_epoch' is not known; did you mean 'num_epochs'\?"],
        ),
        (
            {"workflo": "agent:play"},
            [r"config.yml:\d+:1: key 'workflo' is not known; did you mean 'workflow'"],
        ),
        (
            {"trajectory_builders__grpo__num_generation": 3},
            [r"key 'trajectory_builders.grpo.num_generation' is not known; did you mean 'num_generations'"],
        ),
        (
            {"finetuning__num_epochs": "many"},
            [r"finetuning.num_epochs: expected an integer >= 1, found 'many'"],
        ),
        ({"finetuning__num_epochs": 0}, [r"expected an integer >= 1, found 0"]),
        ({"eval__general__timeout": -1}, [r"eval.general.timeout: expected a number > 0"]),
        ({"llms__policy___type": "locl"}, [r"there is no model type 'locl'; did you mean 'local'"]),
        ({"trajectory_builders": []}, [r"trajectory_builders: expected a mapping"]),
        ({"finetuning__reward_function__name": "corect"}, ["did you mean 'correct'"]),
        ({"finetuning__seed": "${ETUDE_SEED_OF_NOBODY}"}, ["ETUDE_SEED_OF_NOBODY' is not set"]),
    ],
)
def test_keys_that_are_wrong(project, command, keys, texts):
    change(project / "config.yml", **keys)
    refused(etude(command, "config.yml"), WRONG, *texts)
    assert not (project / "runs").exists()


def test_everything_that_is_wrong_is_told_at_once(project):
    change(project / "config.yml", finetuning__num_epochs=0, eval__genral={}, workflow="agnet:play")
    shown = etude("train", "config.yml")
    refused(shown, WRONG, "num_epochs", "did you mean 'general'", "did you mean 'agent'")


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["train", "confg.yml"], [r"there is no config file confg.yml; did you mean config.yml\?"]),
        (["train", "nowhere/config.yml"], ["there is no folder nowhere"]),
        (["train", "."], ["Is a directory"]),
        (["train", "config.yml", "-o", "finetuning.num_epoch=3"], ["-o finetuning.num_epoch: .*num_epochs"]),
        (["train", "config.yml", "-o", "finetuning.num_epochs"], ["is written key.of.the.config=value"]),
        (["train", "config.yml", "-o", "llms.policy.model={"], ["is not valid YAML"]),
        (["train", "config.yml", "--name", "../up"], ["cannot name a run"]),
        (["train", "config.yml", "--dataset", "trian.jsonl"], [r"trian.jsonl does not exist; did you mean"]),
        (["resume", "nothing"], ["there is no run 'nothing'", "there are no runs in runs"]),
        (["runs", "show", "nothing"], ["there is no run 'nothing'"]),
        (["export", "train.jsonl"], ["there is no run 'train.jsonl'"]),
        (["jobs", "."], ["there is no run '.'"]),
        (["init", "."], ["has agent.py, .* already"]),
        (["evaluate", "--rescore", "nothing"], ["there is no run 'nothing'"]),
    ],
)
def test_things_that_are_not_there(project, arguments, texts):
    refused(etude(*arguments), WRONG, *texts)


def test_a_config_that_is_no_yaml(project):
    (project / "config.yml").write_text("llms:\n\tpolicy: 3\n")
    refused(etude("train", "config.yml"), WRONG, "config.yml:2:1: not valid YAML: .* not with tabs")
    (project / "config.yml").write_text("")
    refused(etude("train", "config.yml"), WRONG, "the file is empty; `etude init`")


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        ("", ["train.jsonl holds no examples"]),
        ('{"id": "1", "question": "a"\n', [r"train.jsonl:1:\d+: broken JSON"]),
        ('{"question": "a"}\n', ["train.jsonl:1: there is no id in column 'id'", "ids: from_row"]),
        (rows(1, "t") * 2, ["train.jsonl:2: id 't0' is taken already by .*train.jsonl:1"]),
        ("3\n", ["train.jsonl:1: a row is an object"]),
    ],
)
def test_datasets_that_are_no_use(project, text, texts):
    (project / "train.jsonl").write_text(text)
    refused(etude("train", "config.yml"), WRONG, *texts)
    assert list((project / "runs").iterdir()) == []
    checked = etude("check", "config.yml")
    assert checked.exit_code == WRONG
    assert re.search(texts[0], checked.stdout)


@pytest.mark.parametrize(
    ("code", "texts"),
    [
        ("def play(:\n", [r"cannot import 'agent:play': .*agent.py:1: SyntaxError"]),
        (
            "import a_package_of_nobody\n",
            ["cannot import 'agent:play': .*No module named 'a_package_of_nobody'"],
        ),
        ("1 / 0\n", [r"agent.py:1: ZeroDivisionError"]),
        ("def plya(example, episode): ...\n", [r"has no 'play'; did you mean 'agent:plya'\?"]),
        (
            f"{CORRECT}def play(): ...\n",
            [r"agent.py:\d+: workflow .play. is called with .example, episode., and takes"],
        ),
    ],
)
def test_agents_that_cannot_be_imported(project, code, texts):
    (project / "agent.py").write_text(code)
    for command in ("train", "check"):
        shown = etude(command, "config.yml")
        told = shown.stderr + shown.stdout
        assert shown.exit_code == WRONG, told
        assert "Traceback" not in told
        assert [text for text in texts if not re.search(text, told)] == [], told


@pytest.mark.parametrize(
    ("code", "texts"),
    [
        (PLAY + "    raise ValueError('no idea')\n", [r"raised: 2", r"agent.py:\d+: ValueError: no idea"]),
        (PLAY + "    return None\n", ["no_output: 2", "the workflow returned None; return its answer"]),
        (
            PLAY + "    import asyncio\n    await asyncio.sleep(3600)\n    return ''\n",
            [r"timeout: 2", "no output within 0.3 s"],
        ),
        (
            "def play(example, episode):\n    import threading\n    threading.Event().wait()\n",
            [r"timeout: 2", "no output within 0.3 s"],
        ),
        (PLAY + "    raise SystemExit(3)\n", [r"agent.py:\d+: .*SystemExit: 3"]),
        (PLAY + "    return object()\n", ["no_output: 2", "the output cannot be kept"]),
        (
            PLAY + "    return (await episode.chat([{'role': 'user', 'content': 'broken'}])).text\n",
            ["call_failed: 2", "the endpoint answered 500 five times"],
        ),
    ],
    ids=["raises", "none", "never", "never in a thread", "exits", "no json", "no answer"],
)
def test_agents_that_fail(project, code, texts):
    (project / "agent.py").write_text(CORRECT + code)
    if "timeout: 2" in texts:
        change(project / "config.yml", eval__general__timeout=0.3)
    shown = etude("train", "config.yml", "--name", "r")
    refused(shown, FAILED, "more than the error budget of 20 % allows", "next: etude resume runs/r", *texts)


ANSWER = PLAY + "    return (await episode.chat([{'role': 'user', 'content': 'q'}])).text\n\n\n"


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ("return float('nan')", [r"score:correct: 2", "the evaluator returned nan"]),
        ("return None", ["the evaluator returned None; a score is a number"]),
        ("return 'good'", ["the evaluator returned a str"]),
        ("return output['score']", [r"agent.py:\d+: TypeError"]),
        ("import time; time.sleep(30)", ["the evaluator took longer than 0.3 s"]),
    ],
    ids=["nan", "none", "text", "raises", "never"],
)
def test_evaluators_that_fail_are_no_zero(project, body, texts):
    evaluators = (
        f"def correct(example, output):\n    {body}\n\n\ndef brief(example, output):\n    return 1.0\n"
    )
    (project / "agent.py").write_text(ANSWER + evaluators)
    limit = {"_type": "agent:correct", "timeout": 0.3 if "sleep" in body else 300}
    change(project / "config.yml", eval__evaluators__correct=limit, llms__policy__log=str(project / "log"))
    shown = etude("train", "config.yml", "--name", "r")
    refused(shown, FAILED, "episodes have no score from 'correct'", *texts)
    sampled = (project / "log").read_text().splitlines()
    (project / "agent.py").write_text(
        ANSWER + evaluators.replace(body, "return 1.0 if output == 'yes' else 0.0")
    )
    mended = finished("resume", "r", "-o", "eval.evaluators.correct.timeout=300", folder=project)
    assert mended.returncode == 0, mended.stderr
    everything = (project / "log").read_text().splitlines()
    assert everything[: len(sampled)] == sampled
    assert len(set(everything)) == len(everything), "a paid call was made twice"


def test_a_model_that_is_not_there(local):
    change(local / "config.yml", llms__policy__model="./bsae")
    refused(etude("train", "config.yml"), WRONG, "there is no model at './bsae': the folder does not exist")
    assert list((local / "runs").iterdir()) == []


def test_a_model_name_that_nobody_knows(local, monkeypatch):
    change(local / "config.yml", llms__policy__model="nobodys-model")
    shown = finished("train", "config.yml", folder=local)
    refused(
        shown,
        WRONG,
        "there is no folder 'nobodys-model' and no such model in the cache",
        "HF_HUB_OFFLINE is set",
    )


def test_a_folder_that_holds_no_model(local):
    (local / "empty").mkdir()
    change(local / "config.yml", llms__policy__model="empty")
    refused(etude("train", "config.yml"), WRONG, "cannot load the model '.*empty'")


def test_an_endpoint_that_does_not_answer(project):
    model = {"_type": "openai", "model_name": "m", "base_url": "http://127.0.0.1:9/v1", "max_retries": 0}
    change(project / "config.yml", llms={"policy": model})
    shown = etude("evaluate", "config.yml", "--name", "e")
    refused(shown, FAILED, "Its last 5 calls failed", "127.0.0.1:9", "next: etude resume runs/e")


def test_a_run_folder_of_another_version(project):
    assert etude("train", "config.yml", "--name", "r").exit_code == 0
    with sqlite3.connect(project / "runs/r/run.db") as database:
        database.execute("PRAGMA user_version=99")
    for arguments in (["resume", "r"], ["runs", "show", "r"], ["jobs", "r"], ["export", "r"]):
        refused(etude(*arguments), FAILED, "has schema version 99, and this version of etude reads version 2")
    listed = json.loads(etude("runs", "list", "--json").stdout)
    assert [run["state"] for run in listed] == ["unreadable"]


def test_a_run_whose_weights_were_deleted(local):
    assert etude("train", "config.yml", "--name", "r").exit_code == 0
    shutil.rmtree(local / "runs/r/checkpoints")
    refused(etude("export", "r", "--version", "v1"), WRONG, "the weights of v1 of run r were not kept")


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
    refused(shown, WRONG, r"needs the extra 'local'. Install it: pip install .*\[local\]")
    shown = started_anew("demo", "--out", "demo", folder=tmp_path, environment=path)
    refused(shown, WRONG, r"pip install .*\[local\]")
    assert not (tmp_path / "demo").exists()
    shown = started_anew("train", "config.yml", folder=tmp_path / "other", environment=path)
    assert shown.returncode == 0, shown.stderr


def test_a_limit_on_the_size_of_files_loses_nothing(tmp_path):
    _disk_fills_up(tmp_path, tmp_path / "runs", limit=120_000)


def test_a_full_disk_loses_nothing(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk is not allowed here")
    try:
        _disk_fills_up(tmp_path, disk, limit=None)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def _disk_fills_up(folder: Path, runs: Path, limit: int | None) -> None:
    config = scripted_project(folder)
    (folder / "train.jsonl").write_text(rows(60, "t"))
    change(config, finetuning__output_dir=str(runs), llms__policy__log=str(folder / "log"))

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    options = {} if limit is None else {"preexec_fn": small_files}
    shown = started_anew("train", "config.yml", "--name", "r", folder=folder, **options)
    refused(shown, FAILED, "disk", "free some space", "next: etude resume")
    kept = _calls(runs / "r")
    assert kept
    if limit is None:
        subprocess.run(["mount", "-o", "remount,size=50m", str(runs)], check=True)
    mended = finished("resume", str(runs / "r"), folder=folder)
    assert mended.returncode == 0, mended.stderr
    assert kept <= _calls(runs / "r")
    sampled = (folder / "log").read_text().splitlines()
    # Only what was on its way to the disk when it filled up was sampled again.
    assert len(sampled) - len(set(sampled)) <= 64


def _calls(run: Path) -> set[str]:
    with sqlite3.connect(run / "run.db") as database:
        return {key for (key,) in database.execute("SELECT key FROM steps WHERE key LIKE '%/call/%'")}


def test_a_part_that_does_not_fit_leaves_the_rest_of_its_module_alone(project):
    code = "import etude\n\n\n@etude.evaluator\ndef lonely(example):\n    return 1.0\n\n\n"
    code += "@etude.workflow\ndef empty():\n    return ''\n\n\n"
    code += "@etude.workflow\nasync def fine(example, episode):\n    return 'yes'\n"
    (project / "bad.py").write_text(code)
    well = etude("evaluate", "config.yml", "-o", "workflow=bad:fine")
    assert well.exit_code == 0, well.stderr
    for override, told in (
        (
            "workflow=bad:empty",
            r"bad.py:9: workflow 'empty' is called with \(example, episode\), and takes \(\)",
        ),
        ("eval.evaluators.correct=bad:lonely", r"bad.py:4: the evaluator lonely\(example\) cannot be called"),
    ):
        refused(etude("evaluate", "config.yml", "-o", override), WRONG, told)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("workflow=no_module:x", "error: -o workflow: cannot import 'no_module:x'"),
        ("finetuning.num_epochs=x", "error: -o finetuning.num_epochs: expected an integer >= 1, found 'x'"),
        ("finetuning.target_model=x", "error: -o finetuning.target_model: 'llms' has no model 'x'"),
        ("finetuning.num_epoch=3", "error: -o finetuning.num_epoch: key 'finetuning.num_epoch' is not known"),
    ],
)
def test_an_override_is_named_once(project, override, told):
    refused(etude("train", "config.yml", "-o", override), WRONG, re.escape(told))


@pytest.mark.parametrize(
    "command",
    [
        ["serve", "modles/tiny"],
        ["evaluate", "config.yml", "--model", "modles/tiny"],
        ["train", "config.yml", "-o", "llms.policy.model=modles/tiny"],
    ],
)
def test_a_mistyped_model_is_answered_with_the_nearest_folder(local, base, command):
    shutil.copytree(base, local / "models" / "tiny")
    told = "there is no folder 'modles/tiny'; did you mean './models/tiny'?"
    refused(etude(*command), WRONG, re.escape(told))
