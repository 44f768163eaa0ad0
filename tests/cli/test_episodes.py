"""`etude evaluate` and `etude episodes`: scores with their intervals, and what was said in an episode."""

import json
import sys

import pytest
import yaml

from etude import load_run
from tests.cli.projects import change, etude, fail, succeed


def evaluate(*options):
    assert etude("evaluate", "config.yml", "--name", "e", *options).exit_code == 0


def list_rows(*words):
    return json.loads(succeed("episodes", "--json", *words).stdout)


def test_episodes_are_listed_and_filtered(project):
    evaluate()
    everything = list_rows("e")
    assert everything and all(each["phase"] == "eval" for each in everything)
    right, wrong = list_rows("e", "reward=1"), list_rows("e", "--", "-reward=1")
    assert sorted(each["id"] for each in right + wrong) == [each["id"] for each in everything]
    assert list_rows("e", "failed") == []
    assert len(list_rows("e", "--limit", "1")) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["e", "reward<x"], "reward<0.5"),
        (["e", "--phase", "train/9"], "there are: eval"),
        (["show"], "name one episode"),
        (["show", "train/1/x/0"], "no finished episode"),
        (["nothing"], "no run 'nothing'"),
    ],
)
def test_what_cannot_be_done_is_said(project, words, said):
    evaluate()
    shown = etude("episodes", *words)
    assert shown.exit_code == 2 and said in shown.stderr


GAME = '''
import etude


def look_up(word: str) -> str:
    """Look a word up."""
    return f"{word} means\\nyes"


@etude.workflow
async def looks_up(example, episode):
    episode.note("begins")
    messages = [{"role": "user", "content": example.inputs["question"]}]
    called = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "t"}'}}
    with episode.function("solver"):
        first = await episode.chat(messages, tools=[look_up])
        messages += [first.message, {"role": "assistant", "content": None, "tool_calls": [called]}]
        messages.append({"role": "tool", "tool_call_id": "1", "content": look_up("t")})
        await episode.chat(messages)
    episode.step_reward(0.5, "looked it up")
    await episode.chat([{"role": "user", "content": "done?"}])
    return first.text
'''


def show_lines(*options):
    shown = succeed("episodes", "show", "eval/v0/0", "--run", "e", *options)
    return shown.stdout.partition("next: ")[0].rstrip("\n") + "\n"


def read(*options):
    return yaml.safe_load(show_lines(*options))


def test_an_episode_reads_from_top_to_bottom(project):
    evaluate("--greedy")
    assert show_lines() == (
        "---\n"
        "episode: eval/v0/0\n"
        "example: v0\n"
        "inputs:\n"
        "  question: v0?\n"
        "expected: 'yes'\n"
        "turns:\n"
        "- user: v0?\n"
        "- policy: 'yes'\n"
        "  about: call 0, v0\n"
        "output: 'yes'\n"
        "reward: 1.0\n"
        "scores:\n"
        "  brief:\n"
        "    score: 0.25\n"
        "    reasoning: shorter is better\n"
        "  correct: 1.0\n"
    )


def test_tools_and_events_are_shown_where_they_happened(project):
    (project / "game.py").write_text(GAME)
    change(project / "config.yml", workflow="game:looks_up")
    evaluate("--greedy")
    shown = read()["turns"]
    assert shown[:2] == [{"note": "begins"}, {"user": "v0?"}]
    # What was said before is not said again.
    assert [next(iter(turn)) for turn in shown[2:6]] == ["solver", "assistant", "tool", "solver"]
    assert shown[3]["tool_calls"] == [{"look_up": {"word": "t"}}] and shown[4]["tool"] == "t means\nyes"
    assert shown[6:8] == [{"step reward": "0.5; looked it up"}, {"user": "done?"}]


def test_a_failed_episode_is_shown_up_to_its_failure(project):
    line = json.dumps({"id": "v0", "question": "broken?", "answer": "yes"}) + "\n"
    (project / "validation.jsonl").write_text(line)
    etude("evaluate", "config.yml", "--name", "e", "-o", "finetuning.error_budget=1")
    shown = read()
    assert shown["failure"].startswith("call_failed: ") and "output" not in shown
    asked, answered = shown["turns"]
    assert asked == {"user": "broken?"} and "500" in answered["policy failed"]


def scores_told(*arguments):
    return json.loads(succeed("evaluate", *arguments, "--json").stdout)


def test_the_held_out_examples_are_evaluated_and_results_are_kept(project):
    change(project / "config.yml", eval__general__output_dir=str(project / "results"))
    result = scores_told("config.yml", "--name", "e")
    assert result["examples"] == 6
    assert {item["id"] for item in result["items"]} == {f"v{n}" for n in range(6)}
    scores = result["scores"]["correct"]
    assert scores["low"] <= scores["mean"] <= scores["high"]
    assert (scores["n"], scores["scored"], scores["unscored"]) == (6, 6, 0)
    run = load_run("e")
    assert run.scores["correct"]["n"] == 6
    assert json.loads((project / "results/evaluation.json").read_text()) == run.summary
    for folder in (run.folder, project / "results"):
        assert len((folder / "items.jsonl").read_text().splitlines()) == 6


def test_a_version_of_a_run_is_evaluated_and_its_export_does_the_same(after_run):
    base, first, best = (scores_told("config.yml", "--model", f"r{wish}") for wish in (":base", ":v1", ""))
    assert (base["model"], first["model"]) == ("r:base", "r:v1")
    assert best["model"] in ("r:v1", "r:v2", "r:base")
    outputs = [[item["output"] for item in result["items"]] for result in (base, first)]
    assert outputs[0] != outputs[1]
    succeed("export", "r", "--version", "v1", "--out", "mine")
    for model in ("runs/r:v1", "mine"):
        again = scores_told("config.yml", "--model", model)
        assert [item["output"] for item in again["items"]] == outputs[1]


@pytest.mark.parametrize("named", [False, True])
def test_stored_episodes_are_scored_again_without_running_the_agent(project, named):
    options = []
    if named:  # A run is looked for where the named config keeps runs.
        change(project / "config.yml", finetuning__output_dir="elsewhere")
        options = ["config.yml"]
    scores_told("config.yml", "--name", "e")
    agent = (project / "agent.py").read_text()
    agent = agent.replace("return float(output == example.expected)", "return 0.25")
    agent = agent.replace("reply = await", "raise RuntimeError('the agent ran')\n    reply = await")
    (project / "agent.py").write_text(agent)
    del sys.modules["agent"]
    result = scores_told("--rescore", "e", *options)
    assert result["phase"] == "eval"
    assert result["scores"]["correct"]["mean"] == 0.25


def test_any_phase_of_a_training_run_can_be_scored_again(project):
    assert etude("train", "config.yml", "--name", "r").exit_code == 0
    assert scores_told("--rescore", "r")["phase"] == "validation/2"
    result = scores_told("config.yml", "--rescore", "runs/r", "--phase", "train/2")
    assert (result["phase"], result["episodes"]) == ("train/2", 32)
    shown = fail("evaluate", "--rescore", "r", "--phase", "train/8")
    assert "there are: validation/2, validation/0, train/2, train/1" in shown.stderr
