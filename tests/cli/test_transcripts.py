"""`etude transcripts`: what was said in a run, as a person reads it."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.cli.projects import change, etude, rows

GAME = '''
import etude
from etude.protocols import Scenario, dialogue


class Claims(Scenario):
    def render(self, example, log, agent, turn):
        return dialogue(log, agent, f"You are {agent}. {example.inputs['question']}")

    def truth(self, example):
        return 1

    def parse(self, text, turn):
        """Every answer counts; the model can say no more than yes and no."""
        decision = f"Decision: {'accept' if text == 'yes' else 'reject'}"
        return super().parse(decision if turn.decide == "must" else text, turn)


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


def read(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def evaluated(*options):
    assert etude("evaluate", "config.yml", "--name", "e", *options).exit_code == 0


def told(*arguments):
    shown = etude("transcripts", *arguments, "--json")
    assert shown.exit_code == 0, shown.stderr
    return json.loads(shown.stdout)


@pytest.fixture
def game(project):
    (project / "game.py").write_text(GAME)
    return project


def test_an_episode_reads_from_top_to_bottom(project):
    evaluated("--greedy")
    shown = etude("transcripts", "e")
    assert shown.exit_code == 0
    assert "wrote           6 transcripts of eval" in shown.stdout
    assert "the first       runs/e/transcripts/eval/v0-0.yaml" in shown.stdout
    assert (project / "runs/e/transcripts/eval/v0-0.yaml").read_text() == (
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
    evaluated("--greedy")
    told("e")
    started, first, second, rewarded, third = read(game / "runs/e/transcripts/eval/v0-0.yaml")["turns"]
    assert started == {"note": "begins"}
    assert first["function"] == "solver" and first["prompt"] == [{"user": "v0?"}]
    # What was said before is not said again.
    assert second["prompt"] == [
        {"tool_calls": [{"look_up": {"word": "t"}}]},
        {"tool": "t means\nyes"},
    ]
    assert rewarded == {"step_reward": 0.5, "reason": "looked it up"}
    assert third["prompt"] == [{"user": "done?"}] and "function" not in third


def test_raw_is_what_was_sent_and_received(game):
    change(game / "config.yml", workflow="game:looks_up")
    evaluated("--greedy")
    told("e", "--raw")
    second = read(game / "runs/e/transcripts/eval/v0-0.yaml")["turns"][2]
    assert [message["role"] for message in second["prompt"]] == ["user", "assistant", "assistant", "tool"]
    assert second["prompt"][2]["tool_calls"][0]["function"]["arguments"] == '{"word": "t"}'
    assert second["answer"] == {"role": "assistant", "content": "yes"}


def test_plays_of_a_protocol_are_shown_by_agent_and_channel(game):
    workflow = {"_type": "protocol", "protocol": "adp", "scenario": "game:Claims"}
    evaluators = {"verifier": {"_type": "protocol_reward", "agent": "verifier"}}
    reward = {"name": "verifier"}
    change(
        game / "config.yml",
        workflow=workflow,
        eval__evaluators=evaluators,
        finetuning__reward_function=reward,
    )
    evaluated("--greedy")
    told("e")
    shown = read(game / "runs/e/transcripts/eval/v0-0.yaml")
    assert shown["turns"] == [
        {"round": 0, "prover@main": "yes"},
        {"round": 1, "verifier.decision": "accept (1)"},
    ]
    assert (shown["reward"], shown["rewards"]) == (1.0, {"prover": 1.0, "verifier": 1.0})
    told("e", "--raw")
    assert read(game / "runs/e/transcripts/eval/v0-0.yaml")["turns"][0] == {"round": 0, "prover": "yes"}


def test_the_phase_the_folder_and_the_format_are_chosen(project):
    assert etude("train", "config.yml", "--name", "r").exit_code == 0
    assert told("r")["phase"] == "validation/2"
    chosen = told("r", "--phase", "train/2", "--out", "read", "--format", "json", "--limit", 3)
    assert chosen["files"] == ["t0-0.json", "t0-1.json", "t0-2.json"]
    assert sorted(path.name for path in (project / "read").iterdir()) == chosen["files"]
    assert json.loads((project / "read/t0-0.json").read_text())["episode"] == "train/2/t0/0"
    wrong = etude("transcripts", "r", "--phase", "train/8")
    assert wrong.exit_code == 2
    assert "train/1" in wrong.stderr


def test_a_failed_episode_is_shown_up_to_its_failure(project):
    (project / "validation.jsonl").write_text(rows(2, "broken"))
    etude("evaluate", "config.yml", "--name", "e", "-o", "finetuning.error_budget=1")
    assert "failed          2 of these episodes" in etude("transcripts", "e").stdout
    shown = read(project / "runs/e/transcripts/eval/broken0-0.yaml")
    assert shown["failure"].startswith("call_failed: ") and "output" not in shown
    assert shown["turns"][0]["prompt"] == [{"user": "broken0?"}]
    assert "500" in shown["turns"][0]["error"]


def test_every_episode_has_a_file_of_its_own_whatever_its_id(project):
    ids = ["../a", "a b", "a_b", "…", ".hidden", "a" * 300]
    lines = [json.dumps({"id": id, "question": "v0?", "answer": "yes"}) + "\n" for id in ids]
    (project / "validation.jsonl").write_text("".join(lines))
    evaluated()
    files = told("e", "--out", "read")["files"]
    assert len(set(files)) == len(ids) and "a_b-0.yaml" in files
    written = sorted((project / "read").iterdir())
    assert sorted(path.name for path in written) == sorted(files)
    assert {read(path)["example"] for path in written} == set(ids)


def test_a_run_that_is_not_there_is_a_wrong_request(project):
    evaluated()
    wrong = etude("transcripts", "f")
    assert wrong.exit_code == 2
    assert "there is no run 'f'" in wrong.stderr
