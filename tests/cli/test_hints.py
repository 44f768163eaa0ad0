"""Every `next:` line works: in the state in which it is printed, pasted into a shell."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import etude as etude_library
from etude.cli import hints
from etude.core.errors import MissingExtraError
from tests.cli.projects import ROOT, TWO_MODELS, change, etude, local_project, rows, scripted_project
from tests.cli.test_demo import small_example  # noqa: F401
from tests.endpoint_process import EndpointProcess
from tests.forked import program

EQUAL = """
import etude

@etude.workflow
async def play(example: etude.Example, episode: etude.Episode) -> str:
    return (await episode.chat([{"role": "user", "content": example.inputs["question"]}])).text

@etude.evaluator
def correct(example: etude.Example, output: str) -> float:
    return 0.5
"""


HINTS = {
    name
    for name, made in vars(hints).items()
    if inspect.isfunction(made)
    and made.__module__ == hints.__name__
    and not name.startswith(("_", "after_", "at_"))
}
"""Every hint that there is, by its function; the others choose among them."""


@pytest.fixture
def printed(monkeypatch) -> set[str]:
    """The names of the hints that were made in this process, to be printed."""
    names: set[str] = set()

    def spied(name: str) -> Callable[..., str]:
        make = getattr(hints, name)

        def made(*args: Any, **kwargs: Any) -> str:
            names.add(name)
            return str(make(*args, **kwargs))

        return made

    for name in HINTS:
        monkeypatch.setattr(hints, name, spied(name))
    return names


@pytest.fixture
def away(monkeypatch):
    """A backend that takes no jobs in this process."""
    monkeypatch.setattr("tests.training.FakeAdapter.submit", lambda *args: 1 / 0)


def last_line(shown: Any) -> str:
    """The command that the last line offers."""
    line = (shown.stdout if shown.exit_code == 0 else shown.stderr).rstrip().splitlines()[-1]
    assert line.startswith("next: "), shown.stdout + shown.stderr
    return str(line.removeprefix("next: "))


def pasted(line: str, folder: Path | None = None) -> str:
    """The output of a line that is pasted into a shell. It must succeed."""
    environment = {**os.environ, "PATH": os.pathsep.join([str(program()), os.environ["PATH"]])}
    shell = ["bash", "--norc", "-c", line]
    done = subprocess.run(
        shell, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def works(shown: Any) -> str:
    return pasted(last_line(shown))


def test_there_is_one_place_where_hints_are_made():
    source = ROOT / "src" / "etude"
    texts = {path.relative_to(source): path.read_text(encoding="utf-8") for path in source.rglob("*.py")}
    assert [str(path) for path, text in texts.items() if re.search(r"""["']\\?n?next: """, text)] == [
        "cli/console.py"
    ]


def after_a_stop(project, printed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.training.FakeAdapter.submit", lambda *args: 1 / 0)
        stopped = etude("train", "config.yml", "--name", "r")
    assert stopped.exit_code == 1
    for shown in (etude("runs", "show", "r"), etude("jobs", "r"), stopped):
        assert last_line(shown) == "etude resume runs/r"
    works(stopped)


def after_a_run_of_local_weights(local, printed):
    shown = etude("train", "config.yml", "--name", "r")
    assert last_line(etude("runs", "show", "r")) == last_line(shown) == "etude export runs/r"
    assert "to              runs/r/export/v" in works(shown)


def after_a_run_at_a_backend(project, printed):
    shown = etude("train", "config.yml", "--name", "r")
    line = "etude evaluate runs/r/config.yml --model runs/r"
    assert last_line(etude("runs", "show", "r")) == last_line(shown) == line
    assert "r:v2" in works(shown)


def after_a_run_at_a_backend_that_names_no_versions(project, printed):
    change(project / "config.yml", trainer_adapters__counting__versions=False)
    shown = etude("train", "config.yml", "--name", "r")
    assert shown.exit_code == 0, shown.stderr
    assert last_line(etude("runs", "show", "r")) == last_line(shown) == "etude jobs runs/r"
    assert "completed" in works(shown)


def after_a_run_that_trained_on_nothing(project, printed):
    (project / "agent.py").write_text(EQUAL)
    change(project / "config.yml", eval__evaluators={"correct": "agent:correct"})
    shown = etude("train", "config.yml", "--name", "r")
    assert shown.exit_code == 1
    again = etude("resume", "r")
    told = etude("runs", "show", "r")
    line = "etude episodes runs/r --phase train/2"
    assert last_line(shown) == last_line(again) == last_line(told) == line
    assert "state           finished, trained on nothing\n" in told.stdout
    assert "episodes of train/2" in works(shown)


def after_things_to_look_at(project, printed):
    assert etude("train", "config.yml", "--name", "a").exit_code == 0
    assert etude("train", "config.yml", "--name", "b").exit_code == 0
    listed = etude("runs", "list")
    assert last_line(listed) == "etude runs show runs/b"
    for shown in (
        listed,
        etude("runs", "compare", "a", "b"),
        etude("jobs", "a"),
        etude("export", "a", "--trajectories", "rows.jsonl"),
        etude("evaluate", "--rescore", "a"),
    ):
        assert "state           finished" in works(shown)


def after_a_check(project, printed):
    shown = etude("check", "config.yml", "-o", "finetuning.num_epochs", "3")
    assert "epochs          3 trained" in works(shown)


def after_a_check_of_a_config_that_trains_nothing(project, printed):
    change(project / "config.yml", finetuning__enabled=False)
    assert "correct" in works(etude("check", "config.yml", "-o", "finetuning.seed=3"))


def after_an_evaluation(project, printed):
    shown = etude("evaluate", "config.yml", "--name", "e")
    assert last_line(etude("runs", "show", "e")) == last_line(shown)
    assert "scored" in works(shown)


def after_a_list_of_episodes(project, printed):
    assert etude("evaluate", "config.yml", "--name", "e").exit_code == 0
    assert "reward" in works(etude("episodes", "e"))


def after_a_log_was_imported(project, printed):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    Path("log.jsonl").write_text(json.dumps({"messages": messages}), encoding="utf-8")
    shown = etude("import-traces", "log.jsonl", "--name", "chats")
    assert "Hello" in works(shown) and "Hello" in works(etude("runs", "show", "chats"))


def after_an_export(local, printed):
    assert etude("train", "config.yml", "--name", "r").exit_code == 0
    assert "export/v" in works(etude("export", "r"))


def without_what_models_need(local, printed):
    (local / "config.yml").unlink()
    with pytest.MonkeyPatch.context() as patch:

        def lacking() -> None:
            raise MissingExtraError("models of this process", "local")

        patch.setattr("etude.inference.local.require_local_extra", lacking)
        shown = etude("runs", "list")
    works(shown)


def after_a_new_project(local, printed):
    model = json.loads((local / "base.json").read_text())
    works(etude("init", "it's mine", "--model", model))


def after_a_look_at_a_damaged_run(project, printed):
    assert etude("train", "config.yml", "--name", "r").exit_code == 0
    with (project / "runs" / "r" / "config.yml").open("a") as config:
        config.write("seed: 1\n")
    assert last_line(etude("runs", "show", "r")) == "etude runs check runs/r"
    assert "config.yml is" in etude("runs", "check", "runs/r").stderr


def after_a_list_of_damaged_runs(project, printed):
    (project / "runs" / "broken").mkdir(parents=True)
    (project / "runs" / "broken" / "run.db").write_bytes(b"this is no database, but it is long enough" * 40)
    works(etude("runs", "list"))


def where_nothing_is(small_example, printed):  # noqa: F811
    """The demo itself takes half a minute: a small one in its place, in this process."""
    for shown in (etude("runs", "list"), etude("doctor", "--no-loop")):
        assert last_line(shown) == "etude demo"
        shown = etude(*shlex.split(last_line(shown))[1:])
        assert shown.exit_code == 0, shown.stderr
    works(shown)


def after_a_demo_that_was_stopped(small_example, printed):  # noqa: F811
    """In a folder of one's own, which is not empty any more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("etude.demo.demo.train_in", lambda *args, **kwargs: 1 / 0)
        shown = etude("demo", "--out", "here it is", "--method", "dpo", "--seed", "3")
    assert shown.exit_code == 1
    words = shlex.split(last_line(shown))
    assert " ".join(words) == "etude demo --task calculator --method dpo --seed 3 --out here it is_2"
    again = etude(*words[1:])
    assert again.exit_code == 0, again.stderr


def after_a_rescoring_that_was_stopped(project, printed):
    assert etude("evaluate", "config.yml", "--name", "e").exit_code == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("etude.loop.evaluation.rescore_run", lambda *args, **kwargs: 1 / 0)
        stopped = etude("evaluate", "--rescore", "e")
    assert stopped.exit_code == 1
    assert "scored" in works(stopped)


def with_two_addresses(project) -> list[EndpointProcess]:
    servers = [EndpointProcess("one"), EndpointProcess("two")]
    for server in servers:
        server.start()
    policy = {"_type": "openai", "model_name": "tiny", "base_url": [server.url for server in servers]}
    change(project / "config.yml", llms__policy={**policy, "api_key": "k"}, finetuning={"enabled": False})
    return servers


def after_addresses_that_answer(project, printed):
    servers = with_two_addresses(project)
    try:
        shown = etude("doctor", "config.yml")
        assert f"✓ model policy at {servers[0].url}: answers in " in " ".join(shown.stdout.split())
        assert "✓" in works(shown)
        servers[0].behave(models=["other"])
        servers[1].kill()
        troubled = etude("doctor", "config.yml", "--json")
        assert troubled.exit_code == 1
        findings = [each for each in json.loads(troubled.stdout)["findings"] if each["status"] == "error"]
        assert [each["detail"].partition(";")[0] for each in findings][:2] == [
            "it does not have the model 'tiny'",
            "ConnectError: All connection attempts failed",
        ]
    finally:
        for server in servers:
            server.kill()


def after_a_tracker_that_is_away(project, printed):
    shown = {"_type": "tests.trackers.parts:file_tracker", "file": "shown.jsonl", "patience": 0}
    change(project / "config.yml", report=shown)
    Path("shown.away").touch()
    assert etude("train", "config.yml", "--name", "one").exit_code == 0
    sent = etude("report", "one", "--wait", "0")
    Path("shown.away").unlink()
    assert last_line(sent) == "etude report runs/one"
    assert "5 of 5 records are there" in works(sent)


SCENARIOS: dict[str, Callable[..., None]] = {
    "resume": after_a_stop,
    "export": after_a_run_of_local_weights,
    "evaluate_version": after_a_run_at_a_backend,
    "jobs": after_a_run_at_a_backend_that_names_no_versions,
    "read_episodes": after_a_run_that_trained_on_nothing,
    "show": after_things_to_look_at,
    "train": after_a_check,
    "evaluate": after_a_check_of_a_config_that_trains_nothing,
    "rescore": after_an_evaluation,
    "show_episode": after_a_list_of_episodes,
    "list_episodes": after_a_log_was_imported,
    "evaluate_exported": after_an_export,
    "check_run": after_a_look_at_a_damaged_run,
    "new_project": without_what_models_need,
    "check_project": after_a_new_project,
    "check_installation": after_a_list_of_damaged_runs,
    "try_demo": where_nothing_is,
    "demo_again": after_a_demo_that_was_stopped,
    "check_config": after_addresses_that_answer,
    "report": after_a_tracker_that_is_away,
    "again": after_a_rescoring_that_was_stopped,
}
"""How a project gets into the state in which a hint is printed; each types what was printed."""


def test_every_hint_is_tried():
    assert set(SCENARIOS) == HINTS


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_hint_works_where_it_is_printed(name, request, printed, base):
    scenario = SCENARIOS[name]
    wanted = scenario.__code__.co_varnames[: scenario.__code__.co_argcount]
    places = {place: request.getfixturevalue(place) for place in wanted}
    if "local" in places:
        (places["local"] / "base.json").write_text(json.dumps(str(base)))
    scenario(**places)
    assert name in printed


def test_a_run_of_several_models_is_exported_by_the_name_of_one(local, base):
    (local / "agent.py").write_text(TWO_MODELS)
    model = {"_type": "local", "model": str(base), "max_tokens": 8}
    change(
        local / "config.yml",
        llms={"left": model, "right": model},
        finetuning__targets={"left": {}, "second": {"model": "right"}},
        finetuning__num_epochs=1,
    )
    shown = etude("train", "config.yml", "--name", "r")
    assert last_line(shown) == "etude export runs/r --version left"
    works(shown)
    works(etude("export", "r", "--version", "second:best"))


def test_a_run_without_validation_is_exported_too(local, base):
    unmeasured = ("-o", "finetuning.run_configuration.validation_dataset=null")
    shown = etude("train", "config.yml", "--name", "r", *unmeasured)
    assert last_line(shown) == "etude export runs/r"
    works(shown)


@pytest.mark.slow
def test_an_exported_model_of_a_program_begins_a_project(tmp_path, monkeypatch, base):
    monkeypatch.chdir(tmp_path)
    etude_library.train(
        talk,
        reward=lambda example, output: len(output) + sum(map(ord, output)) / 1000,
        examples=[{"id": 1}, {"id": 2}],
        model={"model": str(base), "max_tokens": 4},
        algorithm=etude_library.Grpo(group=4),
        backend={"_type": "local", "learning_rate": 1e-3},
        epochs=1,
        name="r",
        progress=False,
    )
    shown = etude("export", "r", "--out", "mine").stdout
    assert "next: etude init my_agent --model mine" in shown
    assert etude("init", "my_agent", "--model", "mine").exit_code == 0


async def talk(example: Any, episode: Any) -> str:
    answer: str = (await episode.chat([{"role": "user", "content": "Hello"}])).text
    return answer


def test_exported_lora_weights_are_evaluated_as_a_version(local):
    change(local / "config.yml", trainer_adapters__local__lora={"r": 2})
    assert etude("train", "config.yml", "--name", "r").exit_code == 0
    works(etude("export", "r", "--lora"))


def test_a_run_that_another_process_has_open_is_looked_at(project):
    from etude.store.run_folder import RunFolder

    assert etude("train", "config.yml", "--name", "r").exit_code == 0
    (project / "runs/r/summary.json").unlink()
    with RunFolder.open(project / "runs" / "r"):
        for shown in (etude("runs", "show", "r"), etude("jobs", "r"), etude("runs", "list")):
            works(shown)


def test_nothing_is_offered_where_something_must_be_mended_first(project):
    change(project / "config.yml", workflow="agent:missing")
    shown = etude("check", "config.yml")
    assert shown.exit_code == 2
    assert "next: " not in shown.stdout + shown.stderr


def test_a_secret_that_was_typed_is_not_printed(project):
    shown = etude("check", "config.yml", "-o", "llms.policy.api_key=sk-1", "-o", "finetuning.seed=2")
    assert "sk-1" not in shown.stdout
    assert "add again what is secret: -o llms.policy.api_key=…" in shown.stdout
    assert last_line(shown) == "etude train config.yml -o finetuning.seed=2"


def test_an_agent_may_leave_the_folder(project):
    agent = (project / "agent.py").read_text().replace("    reply =", "    os.chdir('/'); reply =")
    (project / "agent.py").write_text(f"import os\n{agent}")
    change(project / "config.yml", eval__general__max_concurrency=1)
    shown = etude("train", "config.yml", "--name", "r")
    assert last_line(shown) == "etude evaluate runs/r/config.yml --model runs/r"


HARD = 'it\'s a "项目" $HOME & (co); #1'
"""A name that a shell would take apart in many ways."""


@pytest.mark.parametrize("kind", ["scripted", pytest.param("local", marks=pytest.mark.slow)])
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
    stdout = pasted(last_line(etude("check", config)), here)
    trained = stdout.rstrip().splitlines()[-1].removeprefix("next: ")
    pasted(trained, here)
    assert etude("train", config, "--name", HARD).exit_code == 0
    for command in (["runs", "list"], ["runs", "show", HARD], ["jobs", HARD], ["episodes", HARD]):
        pasted(last_line(etude(*command, "--output-dir", runs)), here)
    # Typed in the project itself, where the config begins like an option.
    monkeypatch.chdir(project)
    shutil.rmtree(runs)
    pasted(last_line(etude("check", f"./-{HARD}.yml")), project)


def test_a_run_whose_name_would_break_a_line_is_refused(project):
    shown = etude("train", "config.yml", "--name", "a\nb")
    assert shown.exit_code == 2
    assert "cannot name a run" in shown.stderr


def test_the_error_budget_is_raised_as_the_error_says(project):
    (project / "train.jsonl").write_text(rows(6, "t") + rows(2, "broken"))
    change(project / "config.yml", finetuning__error_budget=0.1)
    shown = etude("train", "config.yml", "--name", "r")
    assert shown.exit_code == 1
    assert "the budget is raised with: -o finetuning.error_budget=" in shown.stderr
    pasted(f"{last_line(shown)} -o finetuning.error_budget=0.5")


STRICT = """

@etude.evaluator
def strict(example: etude.Example, output: str) -> float:
    with open("there is a judge"):
        return 1.0
"""


def test_a_scoring_that_failed_is_typed_again(project):
    with (project / "agent.py").open("a") as agent:
        agent.write(STRICT)
    assert etude("evaluate", "config.yml", "--name", "e").exit_code == 0
    command = ("evaluate", "--rescore", "e", "-o", "eval.evaluators.correct.function=agent:strict")
    shown = etude(*command)
    assert shown.exit_code == 1, shown.stderr
    assert last_line(shown) == shlex.join(("etude", *command))
    (project / "there is a judge").touch()
    works(shown)
