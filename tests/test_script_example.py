"""The example of an agent that is a plain script: OPENAI_BASE_URL and its key are all that it knows."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from etude.core.example import Example
from etude.rollout.collector import EpisodeJob
from etude.store.journal import Journal
from tests.rollout.running import collect_one
from tests.support import ScriptedEngine

FOLDER = Path(__file__).parents[1] / "examples" / "script"


@pytest.fixture
def agent():
    spec = importlib.util.spec_from_file_location("script_agent", FOLDER / "agent.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("program", ["sorter.py", "sorter.sh"])
async def test_what_the_script_asks_is_recorded_with_its_tokens(agent, tmp_path, program):
    if program == "sorter.sh" and shutil.which("curl") is None:
        pytest.skip("curl is not installed")

    async def sort(example, episode):
        return await agent.sort(example, episode, program)

    example = Example("e", {"letters": "cab"}, "abc")
    with Journal(tmp_path / "run.db") as journal:
        record = await collect_one(
            sort, journal, engine=ScriptedEngine(["abc"]), work=[EpisodeJob("train/e/0", example)]
        )
    assert record.failure is None, record.failure
    assert record.output == "abc"
    (call,) = record.calls
    assert call.request.messages == ({"role": "user", "content": "Sort: cab"},)
    assert call.completion.completion_ids and call.completion.logprobs


async def test_a_script_that_fails_is_a_failed_episode(agent, tmp_path, monkeypatch):
    (tmp_path / "sorter.py").write_text("raise SystemExit('it is broken')")
    monkeypatch.setattr(agent, "HERE", tmp_path)
    example = Example("e", {"letters": "cab"}, "abc")
    with Journal(tmp_path / "run.db") as journal:
        record = await collect_one(agent.sort, journal, work=[EpisodeJob("train/e/0", example)])
    assert record.failure is not None
    assert "ended with status 1" in record.failure.reason
    assert "it last said: it is broken" in record.failure.reason
