"""Whole runs by the verbs: from a config, and from the live functions of a program."""

import functools
import importlib
import json
import os
import sys
from datetime import date
from pathlib import Path

import pytest
import yaml

import etude
from etude.config.load import parse_config
from etude.core.episode import Example
from etude.core.errors import DatasetError, RequestError, StoreError, TrainingError
from etude.core.interfaces import innermost
from etude.loop.arguments import build_config, evaluator_configs, workflow_config
from etude.loop.trainer import EpochTrainerConfig
from etude.runtime import open_runtime
from etude.store.run_folder import RunFolder
from etude.verbs import train_in
from tests.cli.projects import scripted_project
from tests.forked import Forked
from tests.support import read_summary


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The current folder, with a config whose parts need no torch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "agent", raising=False)
    scripted_project(tmp_path)
    return tmp_path


def config(**changes):
    return yaml.safe_load(Path("config.yml").read_text()) | changes


async def test_the_runtime_has_examples_models_and_their_sampling(project):
    with RunFolder.create(project, "run") as run:
        async with open_runtime(parse_config(config(llms={"policy": MODEL})), run) as runtime:
            assert [example.id for example in runtime.examples] == [f"t{number}" for number in range(8)]
            assert [example.id for example in runtime.validation_examples] == [f"v{n}" for n in range(6)]
            engine = innermost(runtime.engines["policy"])
            await runtime.evaluation.run(runtime.examples, phase="eval")
        assert {request.sampling.temperature for request in engine.requests} == {0.5}
        assert engine.closed


@pytest.mark.parametrize(
    ("status", "error"), [(None, r"nothing in 0 epochs\. no job was due;"), ("failed", "'failed': no luck")]
)
async def test_a_trainer_that_returns_failures_fails(project, status, error):
    changes = {"trainers": {"mine": {"_type": "tests.guide_parts:careless", "status": status}}}
    with RunFolder.create(project, "run") as run, pytest.raises(TrainingError, match=error):
        await train_in(parse_config(config(**changes)), run)


def score(example, output):
    return 1.0


def double_score(fn):
    @functools.wraps(fn)
    def wrapper(example, output):
        return 2 * fn(example, output)

    return wrapper


@etude.workflow
async def play_here(example, episode):
    return "yes"


def test_a_wrapper_is_never_taken_for_the_function_that_it_wraps():
    """Both say the same name, module and line. A config that named the function would lose the wrapper."""
    assert evaluator_configs(score) == {"score": "tests.test_verbs:score"}
    assert evaluator_configs(double_score(score))["score"].value.fn(None, "") == 2.0
    assert workflow_config(play_here) == "tests.test_verbs:play_here"
    assert workflow_config(etude.workflow(timeout=5)(play_here.fn)).value.timeout == 5


ROWS = [{"id": f"t{n}", "question": f"t{n}?", "answer": "yes"} for n in range(4)]
HELD_OUT = [Example(f"v{n}", {"question": f"v{n}?"}, "yes") for n in range(4)]
MODEL = {"_type": "tests.cli.parts:open_scripted", "temperature": 0.5}
EVALUATED = {"examples": ROWS, "model": MODEL, "progress": False}
PARTS = EVALUATED | {"backend": "tests.cli.parts:counting"}


def own_parts():
    """Functions that no config can name."""

    async def play(example, episode):
        return (await episode.chat([{"role": "user", "content": example.inputs["question"]}])).text

    def correct(example, output):
        return float(output == "yes")

    return play, correct


def test_live_functions_become_a_run_with_all_that_one_asks_of_it(project):
    play, correct = own_parts()
    algorithm = etude.Grpo(group=4)
    run = etude.train(
        play, reward=correct, validation=HELD_OUT, algorithm=algorithm, epochs=2, seed=3, name="mine", **PARTS
    )
    assert (run.name, run.folder) == ("mine", project / "runs" / "mine")
    assert run.summary["epochs_trained"] == 2
    assert run.summary == read_summary(run.folder) and run.facts.state == "finished"
    assert run.summary["measured_on"] == "validation"
    assert [job.status for job in run.jobs] == ["completed"] * 2
    assert len(list(run.episodes)) == 2 * 4 * 4 + 2 * 4
    assert {episode.output for episode in run.episodes.in_phase("train/1")} == {"yes", "no"}
    table = run.metrics
    assert list(table["kind"]) == ["validation", "epoch", "epoch", "validation"]
    assert table["avg_reward"].notna().all()
    assert run.model.version in (1, 2)
    assert str(run.version("last")) == "mine:v2"
    assert run.scores["correct"]["n"] == 4
    stored = yaml.safe_load((run.folder / "config.yml").read_text())
    assert stored["workflow"] == {"_type": "live", "name": "play"}
    assert stored["finetuning"]["seed"] == 3
    assert etude.load_run("mine").summary == run.summary


def test_a_run_of_live_functions_goes_on_with_the_same_functions(project):
    play, correct = own_parts()
    run = etude.train(play, reward=correct, targets="policy", **PARTS)
    assert run.summary["targets"].keys() == {"policy"}, "one target may be given by its name"
    with pytest.raises(RequestError, match=r"its own agent, 'play'.*etude\.resume\('.*', agent=…\)"):
        etude.resume(run, epochs=2, progress=False)
    assert run.facts.state == "finished", "a resume that is refused changes nothing"
    edited = [{**row, "question": "?"} for row in ROWS]
    for others, change in [(ROWS[1:], "is missing"), (edited, "has changed")]:
        with pytest.raises(RequestError, match=f"example 't0' {change} since episode train/1/t0/0"):
            etude.resume(run, agent=play, reward=correct, examples=others, epochs=2, progress=False)
    again = etude.resume(run, agent=play, reward=correct, examples=ROWS[::-1], epochs=2, progress=False)
    assert again.folder == run.folder
    assert again.summary["epochs_trained"] == 2


@pytest.mark.parametrize("content", [b"", b"x" * 9000])
def test_a_run_with_a_damaged_journal_has_no_summary(project, content):
    run = etude.evaluate(own_parts()[0], reward=own_parts()[1], **EVALUATED)
    (run.folder / "run.db").write_bytes(content)
    with pytest.raises(StoreError, match=r"run\.db"):
        _ = run.summary


def test_functions_of_a_module_are_named_in_the_config_and_need_not_be_given_again(project, monkeypatch):
    monkeypatch.syspath_prepend(project)
    agent = importlib.import_module("agent")
    run = etude.train(agent.play, reward=agent.correct, **PARTS | {"examples": "train.jsonl"})
    stored = yaml.safe_load((run.folder / "config.yml").read_text())
    assert stored["workflow"]["function"] == "agent:play"
    assert etude.resume(run.name, epochs=2, progress=False).summary["epochs_trained"] == 2
    assert etude.resume(run, agent=agent.play, epochs=3, progress=False).summary["epochs_trained"] == 3
    with pytest.raises(RequestError, match=r"^agent: .* config"):
        etude.resume(run, agent=own_parts()[0], progress=False)


def test_a_whole_config_takes_the_place_of_the_parts(project):
    run = etude.train("config.yml", epochs=1, progress=False, overrides=["finetuning.seed=5"])
    assert run.summary["epochs_trained"] == 1
    assert yaml.safe_load((run.folder / "config.yml").read_text())["finetuning"]["seed"] == 5
    assert etude.train(config(), epochs=1, progress=False).summary["epochs_trained"] == 1
    assert etude.train(parse_config(config()), progress=False).summary["epochs_trained"] == 2
    with pytest.raises(RequestError, match=r"^reward: .*`overrides`"):
        etude.train("config.yml", reward=own_parts()[1])
    named = config(trainers={"loop": "epochs"})
    named["finetuning"]["trainer"] = "loop"
    run = etude.train(named, patience=9, epochs=1, progress=False)
    assert etude.resume(run, keep_checkpoints=1, epochs=2, progress=False).summary["epochs_trained"] == 2


def test_an_evaluation_returns_scores_and_a_row_for_each_episode(project):
    play, correct = own_parts()
    run = etude.evaluate(
        play, reward={"correct": correct, "short": lambda example, output: 1.0}, repeat=2, **EVALUATED
    )
    assert run.facts.kind == "evaluate"
    assert run.summary["reward"] == "correct"
    assert run.scores["correct"]["n"] == 4 and run.scores["correct"]["scored"] == 8
    assert run.scores["short"]["mean"] == 1.0
    assert list(run.metrics["generation"]) == [0, 1] * 4
    assert list(run.metrics["score.short"]) == [1.0] * 8
    with pytest.raises(RequestError, match=r"epochs: .*evaluation"):
        etude.resume(run, epochs=3)


def _cyclic():
    inputs = {}
    inputs["q"] = inputs
    return inputs


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (10**5000, "4300 digits"),
        (json.loads("[" * 800 + "]" * 800), "nested (too|deeper)"),
        (json.loads("[" * 70 + "]" * 70), "nested deeper than 64 levels"),
        (_cyclic(), "contains itself"),
    ],
    ids=["digits", "800 levels", "70 levels", "cycle"],
)
def test_an_example_that_json_cannot_hold_is_refused_before_anything_is_sampled(project, value, error):
    played = []

    def play(example, episode):
        played.append(example.id)

    rows = [{"id": "a", "q": 1}, {"id": "b", "q": value}]
    with pytest.raises(RequestError, match=f"example 'b' .*JSON: .*{error}"):
        etude.evaluate(play, reward=own_parts()[1], **EVALUATED | {"examples": rows})
    assert not played


def test_examples_that_fail_as_they_are_read_are_a_wrong_request():
    with pytest.raises(RequestError, match=r"examples .*ZeroDivisionError"):
        etude.evaluate(own_parts()[0], examples=({"q": 1 / number} for number in (1, 0)))


@pytest.mark.parametrize("given", [ROWS[0], {"train": ROWS, "test": HELD_OUT}])
@pytest.mark.parametrize("argument", ["examples", "validation"])
def test_examples_that_are_one_row_or_several_splits_are_refused_with_what_to_give(argument, given):
    with pytest.raises(RequestError, match=rf"a dict of {', '.join(given)}\. .*\[row\].*splits\['train'\]"):
        etude.train(own_parts()[0], **EVALUATED | {argument: given})


def test_an_id_that_only_some_rows_have_is_refused():
    rows = [{"id": 7, "question": "?"}, {"question": "!"}]
    with pytest.raises(DatasetError, match=r"row 2: .* `id` .* all rows"):
        etude.evaluate(own_parts()[0], **EVALUATED | {"examples": rows})


def test_an_example_is_each_readers_own_and_is_stored_as_far_as_json_goes(project):
    async def play(example, episode):
        example.inputs["messages"].append({"role": "user", "content": "?"})
        await episode.chat(example.inputs["messages"])
        return "a\u2028b"

    def drop(example, output):
        example.expected.pop()
        return float(len(example.expected))

    values = {"day": date(2026, 1, 1), "question": "q", "scan": b"\xff"}
    rows = [{"id": "a", "messages": [], **values, "answer": [1, 2, 3]}]
    run = etude.evaluate(play, reward=drop, repeat=3, **EVALUATED | {"examples": rows})
    assert list(run.metrics["score.drop"]) == [2.0] * 3
    assert [len(each.calls[0].request.messages) for each in run.episodes] == [1] * 3
    stored = {"messages": [], "day": "2026-01-01", "question": "q", "scan": "b'\\xff'"}
    assert [each.example.inputs for each in run.episodes] == [stored] * 3
    assert next(iter(run.episodes)).example.expected == [1, 2, 3]


def test_rewards_and_tools_of_a_script_are_given_again(project, monkeypatch):
    play, correct = own_parts()

    def short(example, output):
        return 0.25

    def add(left: int, right: int) -> int:
        """Add."""
        return left + right

    rewards = [correct, short]
    etude.train(play, reward=rewards, tools=[add], epochs=1, name="two", **PARTS)
    (project / "tests_tools_module.py").write_text(
        "def add(left: int, right: int) -> int:\n    return left + right\n"
    )
    monkeypatch.syspath_prepend(project)
    tools = [importlib.import_module("tests_tools_module").add]
    given = {"agent": play, "tools": tools, "examples": ROWS, "epochs": 2, "progress": False}
    again = etude.resume("two", reward=rewards, **given)
    assert again.summary["epochs_trained"] == 2
    assert [row["short"]["mean"] for row in again.metrics["evaluators"]] == [0.25, 0.25]
    with pytest.raises(RequestError, match=r"2 evaluators.* 3 "):
        etude.resume("two", reward=[*rewards, short], **given)


def test_a_trained_version_is_evaluated_in_place_of_the_model(project):
    play, correct = own_parts()
    trained = etude.train(play, reward=correct, epochs=2, name="trained", **PARTS)
    run = etude.evaluate(play, reward=correct, examples=HELD_OUT, model=trained.version("v2"), progress=False)
    assert run.summary["model"] == "trained:v2"
    again = etude.evaluate(play, reward=correct, examples=HELD_OUT, model="trained:last", progress=False)
    assert again.scores == run.scores


def test_targets_share_an_algorithm_and_the_first_reward():
    play, correct = own_parts()
    own, rewards = {"algorithm": etude.Grpo(group=4)}, {"a": correct, "b": correct}
    parts = {"model": None, "models": {"x": MODEL, "y": MODEL}, "targets": {"x": own, "y": own}}
    config = build_config(play, parts | {"reward": rewards, "examples": ROWS}, [], {}, enabled=True)
    assert [each.reward_function.name for each in config.finetuning.targets.values()] == ["a", "a"]
    assert list(config.trajectory_builders) == ["grpo"]


KINDS = {
    "pandas": lambda rows: pytest.importorskip("pandas").DataFrame(rows),
    "datasets": lambda rows: pytest.importorskip("datasets").Dataset.from_list(rows),
    "iterable": iter,
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_examples_come_from_tables_and_iterables_and_make_their_own_ids(project, kind):
    play, correct = own_parts()
    rows = [{"question": f"q{n}?", "answer": "yes"} for n in range(3)]
    run = etude.evaluate(play, reward=correct, **EVALUATED | {"examples": kind(rows)})
    assert run.scores["correct"]["n"] == 3
    assert len({episode.example.id for episode in run.episodes}) == 3
    assert {episode.example.expected for episode in run.episodes} == {"yes"}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"name": Path("p")}, "name .* found PosixPath"),
        ({"algorithm": 5}, "algorithm .*`_type`, found 5"),
        ({"reward": date}, "date.* etude.Evaluator"),
        ({"epochs": 1, "num_epochs": 2}, "'epochs' and 'num_epochs'"),
        ({"overrides": "a.b=1"}, "overrides .*list.*found 'a.b=1'"),
        ({"examples": 3}, "examples .* Examples.* found 3"),
        ({"models": {"policy": "other"}}, "'model' and 'models.policy'"),
        ({"dataset": "train.jsonl"}, "'examples' and 'dataset'"),
        ({"model": 3}, "model .*`llms`, found 3"),
        ({"algorithm": "grop"}, "grop.*'grpo'"),
        ({"examples": []}, "examples .* empty"),
        ({"reward": [lambda example, output: 1.0] * 2}, "two rewards .*reward={"),
        ({"trainer": EpochTrainerConfig(), "patience": 2}, "patience: .*EpochTrainerConfig"),
        ({"epochs": 0}, "^epochs: .* 1, found 0"),
        ({"targets": {"nobody": {}}}, "'targets.nobody.model' .*'llms'"),
        ({"overrides": ["llms.policy.temperature=hot"]}, "^-o llms.policy.temperature: .*number.*'hot'"),
        ({"reward": None}, "give reward=, "),
        ({"learning_rate": 1e-4}, "'learning_rate'.*backend={'_type': 'local'"),
        ({"backend": {"_type": "local", "learning_rat": 1}}, "'backend.learning_rat'.*'learning_rate'"),
        ({"algorithm": {"_type": "grpo", "group": 10**11}}, r"algorithm\.group: .*1000, found 100000000000"),
        ({"model": {"model": "tiny", "max_tokens": "few"}}, "^model.max_tokens: .*integer.*'few'"),
        ({"examples": "https://a.b/rows.csv"}, "^examples: 'https://a.b/rows.csv' is not the path"),
        ({"seed": 2**63}, "^seed: .* less than"),
        ({"tools": 5}, "tools .* found 5"),
        ({"algorithm": {"_type": "grpo", "cut_off_penalty": 1e31}}, "cut_off_penalty: .* less than"),
    ],
)
def test_what_is_no_such_part_is_refused_before_there_is_a_folder(project, changes, error):
    play, correct = own_parts()
    with pytest.raises(RequestError, match=error):
        etude.train(play, **{"reward": correct, **PARTS, **changes})
    assert not (project / "runs").exists()


INTERRUPTED = """
import asyncio, os, signal, threading
import etude

presses = iter([threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))])

async def play(example, episode):
    for press in presses:
        press.start()
    try:
        await asyncio.sleep(3600)
    finally:
        print("the agent was cancelled", flush=True)

async def cell():
    etude.train(play, reward=lambda example, output: 1.0, name="stopped", **PARTS)

try:
    asyncio.run(cell())
except KeyboardInterrupt:
    print("interrupted;", etude.load_run("stopped").facts.state)
"""


def test_ctrl_c_in_a_running_event_loop_stops_the_work_and_keeps_the_run(project):
    script = f"PARTS = {PARTS}\n{INTERRUPTED}"
    process = Forked(["-c", script], project, dict(os.environ), program="python")
    output, errors = process.communicate(timeout=300)
    assert "the agent was cancelled" in output, errors
    assert output.splitlines()[-1] == "interrupted; unfinished", errors


def test_a_trained_version_is_evaluated_beside_other_models_and_exported_to_where_a_link_leads(
    tmp_path, monkeypatch
):
    async def ask(example, episode):
        question = [{"role": "user", "content": example.inputs["question"]}]
        return "".join([(await episode.chat(question, model=name)).text for name in ("mine", "other")])

    def score(example, output):
        return float(len(output) % 3)

    monkeypatch.chdir(tmp_path)
    tiny, given = {"tiny": {}, "max_tokens": 4}, {"reward": score, "examples": ROWS, "progress": False}
    backend = {"_type": "local", "lora": {"r": 2}}
    models = {"mine": tiny, "other": tiny}
    run = etude.train(ask, models=models, target_model="mine", backend=backend, epochs=1, **given)
    evaluated = etude.evaluate(ask, model=run.model, models={"other": tiny}, **given)
    calls = [call for episode in evaluated.episodes for call in episode.calls]
    assert {(call.model, call.completion.model_version) for call in calls} == {("mine", 1), ("other", 0)}
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    run.model.export("link")
    assert (tmp_path / "link").is_symlink() and (folder / "model.safetensors").is_file()
    with pytest.raises(RequestError, match="already exists"):
        run.model.export(".")
