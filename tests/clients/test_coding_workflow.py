"""The workflow of docs/agents.md trains what a real coding agent asks of its model."""

import re

import pytest

from etude.core.episode import Example
from etude.rollout.collector import EpisodeJob
from etude.store.journal import Journal
from tests.clients.coding_agents import BIN
from tests.clients.drive import CODING_TASK
from tests.clients.matrix import ROOT
from tests.rollout.running import collect_one
from tests.support import ScriptedEngine, tool_call

pytestmark = [
    pytest.mark.node,
    pytest.mark.skipif(not (BIN / "claude").exists(), reason="npm install --prefix tests/clients/node"),
]


async def test_the_workflow_of_the_docs_records_and_scores_claude_code(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    names = {}
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], names)
    monkeypatch.setenv("PATH", str(BIN), prepend=":")
    example = Example("e", {"task": CODING_TASK}, "3")
    engine = ScriptedEngine([tool_call("Bash", {"command": "echo 3 > answer.txt"}), "It is done."])
    with Journal(tmp_path / "run.db") as journal:
        record = await collect_one(
            names["solve"], journal, engine=engine, work=[EpisodeJob("train/e/0", example)]
        )
    assert record.failure is None, record.failure
    assert names["is_right"](example, record.output) == 1.0
    first, second = record.calls
    assert all(call.completion.completion_ids and call.completion.logprobs for call in record.calls)
    assert second.completion.prompt_ids[: len(first.completion.prompt_ids)] == first.completion.prompt_ids
    (note,) = record.events
    assert "claude ended with status 0" in note.text and "It is done." in note.text
