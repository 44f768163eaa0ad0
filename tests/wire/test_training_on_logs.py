"""From a log to weights: an imported log is scored and learned from."""

import json
from pathlib import Path
from typing import Any

import pytest

from etude.core.episode import EpisodeRecord
from etude.store.episodes import iter_episodes, list_phases, read_episode
from etude.store.facts import read_facts
from etude.store.histories import read_histories
from etude.store.run_folder import RunFolder
from tests.cli.projects import change, etude, fail, succeed

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
LOGGED = {"_type": "logged", "run": "chats"}


def chat(asked: str, answer: str, **facts: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return {"messages": said, **facts}


def with_tool(asked: str, answer: str) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
        {"role": "assistant", "content": answer},
    ]
    return {"messages": messages, "tools": [WEATHER]}


@pytest.fixture
def log_folder(local: Path) -> Path:
    """A project with a log of 26 chats on 12 prompts, of which two have three chats: some good, some bad."""
    rows = [chat(f"t{n}?", text, feedback=len(text)) for n in range(10) for text in ("0", "01234567")]
    rows += [with_tool(f"w{n}?", text) for n in range(2) for text in ("0", "01", "01234567")]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (local / "log.jsonl").write_text(text, encoding="utf-8")
    imported = succeed("import-traces", "log.jsonl", "--name", "chats", "--hold-out", "0.25")
    assert "chats           26 with 32 calls" in imported.stdout
    assert "prompts         12, 12 with several chats, 3 held out" in imported.stdout
    change(
        local / "config.yml",
        workflow={"_type": "agent"},
        eval__general={"dataset": LOGGED},
        trajectory_builders={
            "best": {"_type": "expert_iteration"},
            "all": {"_type": "supervised"},
            "dpo": {"_type": "dpo", "reference": "base"},
            "grpo": {"_type": "grpo"},
        },
        finetuning__trajectory_builder="best",
        finetuning__run_configuration={"validation_dataset": {**LOGGED, "part": "held_out"}},
    )
    return local


def episodes_in(run: str, phase: str) -> list[EpisodeRecord]:
    with RunFolder.read(Path("runs") / run) as folder:
        return [*iter_episodes(folder.journal, f"{phase}/")]


def test_an_imported_log_is_looked_at_and_scored(log_folder: Path):
    facts = read_facts(Path("runs/chats"))
    assert (facts.kind, facts.state) == ("import", "finished")
    assert "import" in etude("runs", "list").stdout
    shown = etude("runs", "show", "chats").stdout
    assert "prompts         12, 12 with several chats, 3 held out" in shown
    assert shown.rstrip().endswith("next: etude episodes runs/chats")
    listed = etude("episodes", "chats", "feedback>5", "--phase", "all")
    assert listed.exit_code == 0 and "10 episodes " in listed.stdout and "t0?" in listed.stdout
    shown = etude("episodes", "show", episodes_in("chats", "chats")[0].id, "--run", "chats")
    assert shown.exit_code == 0 and "0" in shown.stdout
    change(log_folder / "config.yml", finetuning__run_configuration={})
    refused = etude("evaluate", "config.yml", "--greedy")
    assert refused.exit_code == 2 and "`--rescore chats`" in refused.stderr
    scored = etude("evaluate", "config.yml", "--rescore", "chats", "--json")
    scores = json.loads(scored.stdout)["scores"]["varied"]
    assert scores["n"] == 9 and scores["unscored"] == 0
    assert "etude evaluate config.yml --rescore chats" in etude("evaluate", "--rescore", "chats").stderr
    again = etude("import-traces", "log.jsonl", "--name", "chats")
    assert again.exit_code == 2 and "runs/chats already exists" in again.stderr


def test_expert_iteration_learns_from_the_best_chats_and_validates_with_the_model(log_folder: Path):
    succeed("train", "config.yml", "--name", "best")
    with RunFolder.read(Path("runs/best")) as run:
        phases = list_phases(run.journal)
    assert phases == ["validation/2", "validation/0", "train/2", "train/1"]
    read = episodes_in("best", "train/1")
    source = {episode.example.id: episode for episode in episodes_in("chats", "chats")}
    assert {episode.example.id for episode in read} == source.keys() and len(read) in range(18, 22)
    assert all(call.logged and call.model == "policy" for episode in read for call in episode.calls)
    assert all(episode.seconds == 0 and episode.events[:1] for episode in read if len(episode.calls) == 1)
    played = episodes_in("best", "validation/0")
    assert len(played) == 3 and not any(call.logged for episode in played for call in episode.calls)
    assert all(call.completion.completion_ids for episode in played for call in episode.calls)
    (history,) = read_histories(Path("runs/best")).values()
    first = history.epochs[0].metrics
    assert first["episodes"] == len(read) and first["num_trajectories"] == 9
    assert first["completion_tokens"] == 0 and first["model_versions"] == {}
    assert [entry.version.number for entry in history.epochs] == [1, 2]
    assert "trained" in etude("runs", "show", "best").stdout
    assert etude("evaluate", "config.yml", "--model", "best:v2").exit_code == 0


@pytest.mark.parametrize("builder", ["grpo", "dpo -o trajectory_builders.dpo.reference=sampler"])
def test_what_needs_logprobs_is_refused_with_the_reason(log_folder: Path, builder: str):
    name, *more = builder.split()
    refused = fail("train", "config.yml", "-o", f"finetuning.trajectory_builder={name}", *more)
    assert "without token ids" in refused.stderr
    assert "reference: base" in refused.stderr


@pytest.mark.slow
def test_runners_read_what_was_logged_too(log_folder: Path):
    change(log_folder / "config.yml", eval__general={"dataset": LOGGED, "isolation": "process", "runners": 1})
    succeed("train", "config.yml", "--name", "apart", "-o", "finetuning.num_epochs=1")
    assert all(call.logged for episode in episodes_in("apart", "train/1") for call in episode.calls)


def test_feedback_can_be_the_reward(log_folder: Path):
    change(log_folder / "config.yml", eval__evaluators={"liked": {"_type": "measured", "name": "feedback"}})
    change(log_folder / "config.yml", finetuning__run_configuration={}, eval__general={"dataset": {**LOGGED}})
    rows = [chat(f"t{n}?", text, feedback=len(text)) for n in range(4) for text in ("0", "01")]
    Path("liked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert etude("import-traces", "liked.jsonl", "--name", "liked", "--hold-out", "0").exit_code == 0
    change(log_folder / "config.yml", eval__general={"dataset": {**LOGGED, "run": "liked"}})
    succeed("train", "config.yml", "--name", "r", "-o", "finetuning.num_epochs=1")
    with RunFolder.read(Path("runs/r")) as run:
        episode = next(iter_episodes(run.journal, "train/1/"))
        assert run.journal.get(f"{episode.id}/score/liked")["score"] == len(str(episode.output))
        assert read_episode(run.journal, episode.id) == episode
