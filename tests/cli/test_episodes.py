"""`etude episodes`: lists that words filter, and one episode."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.cli.projects import change, etude


@pytest.fixture
def evaluated(project):
    """A run with episodes."""
    assert etude("evaluate", "config.yml", "--name", "e").exit_code == 0
    return project


def listed(*words):
    shown = etude("episodes", "--json", *words)
    assert shown.exit_code == 0, shown.stderr
    return json.loads(shown.stdout)


def test_episodes_are_listed_and_filtered(evaluated):
    everything = listed("e")
    assert everything and all(each["phase"] == "eval" for each in everything)
    right, wrong = listed("e", "reward=1"), listed("e", "--", "-reward=1")
    assert sorted(each["id"] for each in right + wrong) == [each["id"] for each in everything]
    assert listed("e", "failed") == []
    assert len(listed("e", "--limit", "1")) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["e", "reward<x"], "reward<0.5"),
        (["e", "--phase", "train/9"], "there are: eval"),
        (["show"], "name one episode"),
        (["show", "train/1/x/0"], "no episode"),
        (["nothing"], "there is no run"),
    ],
)
def test_what_cannot_be_done_is_said(evaluated, words, said):
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
    async with episode.function("solver"):
        first = await episode.chat(messages, tools=[look_up])
        messages += [first.message, {"role": "assistant", "content": None, "tool_calls": [called]}]
        messages.append({"role": "tool", "tool_call_id": "1", "content": look_up("t")})
        await episode.chat(messages)
    episode.step_reward(0.5, "looked it up")
    await episode.chat([{"role": "user", "content": "done?"}])
    return first.text
'''


def evaluate(*options):
    assert etude("evaluate", "config.yml", "--name", "e", *options).exit_code == 0


def printed(*options):
    shown = etude("episodes", "show", "eval/v0/0", "--run", "e", *options)
    assert shown.exit_code == 0, shown.stderr
    return shown.stdout.partition("next: ")[0].rstrip("\n") + "\n"


def read(*options):
    return yaml.safe_load(printed(*options))


@pytest.fixture
def game(project):
    (project / "game.py").write_text(GAME)
    return project


def test_an_episode_reads_from_top_to_bottom(project):
    evaluate("--greedy")
    assert printed() == (
        "---\n"
        "episode: eval/v0/0\n"
        "example: v0\n"
        "inputs:\n"
        "  question: v0?\n"
        "expected: 'yes'\n"
        "turns:\n"
        "- call: 0\n"
        "  model: policy\n"
        "  prompt:\n"
        "  - user: v0?\n"
        "  assistant: 'yes'\n"
        "  finish_reason: stop\n"
        "output: 'yes'\n"
        "reward: 1.0\n"
        "scores:\n"
        "  brief:\n"
        "    score: 0.25\n"
        "    reasoning: shorter is better\n"
        "  correct: 1.0\n"
    )


def test_tools_and_events_are_shown_where_they_happened(game):
    change(game / "config.yml", workflow="game:looks_up")
    evaluate("--greedy")
    started, first, second, rewarded, third = read()["turns"]
    assert started == {"note": "begins"}
    assert first["function"] == "solver" and first["prompt"] == [{"user": "v0?"}]
    # What was said before is not said again.
    assert second["prompt"] == [
        {"tool_calls": [{"look_up": {"word": "t"}}]},
        {"tool": "t means\nyes"},
    ]
    assert rewarded == {"step_reward": 0.5, "reason": "looked it up"}
    assert third["prompt"] == [{"user": "done?"}] and "function" not in third


def test_a_failed_episode_is_shown_up_to_its_failure(project):
    line = json.dumps({"id": "v0", "question": "broken?", "answer": "yes"}) + "\n"
    (project / "validation.jsonl").write_text(line)
    etude("evaluate", "config.yml", "--name", "e", "-o", "finetuning.error_budget=1")
    shown = read()
    assert shown["failure"].startswith("call_failed: ") and "output" not in shown
    assert shown["turns"][0]["prompt"] == [{"user": "broken?"}]
    assert "500" in shown["turns"][0]["error"]
