"""A view of runs that the store has written."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from etude.core.call import ChatRequest
from etude.core.episode import Event, Failure
from etude.protocols import nip
from etude.store.run_folder import RunFolder
from etude.view.app import create_view
from tests.protocols.games import count_turns, find_agent, play_record
from tests.support import ScriptedEngine
from tests.view.stored import CONFIG_YAML, Told, epoch_entry, store_run

KEY = "the-key-of-a-test"
HINT = "look at <line> 3"

JUDGED = {"score": 1.0, "reasoning": "it is <b>right</b>", "error": None}
UNJUDGED = {"score": None, "reasoning": None, "error": "judge 3 failed"}
EPISODES = [
    Told("train/1/a/0", scores={"correct": 0.0, "style": 0.2}),
    Told(
        "train/1/a/1",
        answers=({"role": "assistant", "content": "hm"}, {"role": "assistant", "content": "four"}),
        scores={"correct": 1.0, "style": 0.9},
        function="solver",
        drifted=True,
    ),
    Told("train/1/b/0", failure=Failure("timeout", "took 30 s"), scores={}, asked="twelve apples?"),
    Told("train/1/b/1", finish_reason="length", scores={"correct": UNJUDGED}),
    Told(
        "train/2/a/0",
        answers=({"role": "assistant", "content": "it is four", "reasoning_content": "2 + 2"},),
        scores={"correct": JUDGED},
        version=1,
        events=(Event("step_reward", 0, 0.5, "good"),),
    ),
    Told("validation/0/a/0", scores={"correct": 0.0}, retried={"http_429": 2}),
]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs."""
    root = tmp_path_factory.mktemp("runs")
    evaluators = {
        "correct": {"mean": 0.5, "low": 0.2, "high": 0.8, "n": 8},
        "style": {"mean": 0.4, "low": None, "high": None, "n": 8},
    }
    store_run(root, "first", EPISODES, [epoch_entry(1, evaluators=evaluators), epoch_entry(2, 0.9)])
    store_run(root, "second", EPISODES[:2], [epoch_entry(1, 0.1, failures={"timeout": 3})])
    store_run(root, "played", config=CONFIG_YAML.replace("{name: correct}", "{name: earned_by_prover}"))
    asyncio.run(play(root / "played"))
    return root


async def play(path: Path) -> None:
    """A play of the protocol `nip` in a run, in which each answers twice, so that it goes eight ways."""

    def answer(request: ChatRequest) -> str:
        if find_agent(request) == "prover":
            return HINT
        return "Decision: " + ("accept" if request.key % 2 else "reject") if count_turns(request) else "why?"

    with RunFolder.open(path) as run:
        engine = ScriptedEngine(answer)
        record = await play_record(nip(max_message_rounds=3), engine, run.journal, widths=2)
        assert record.failure is None, record.failure
        for agent in ("prover", "verifier"):
            score = {"score": 0.5, "reasoning": None, "error": None}
            await run.journal.put(f"{record.id}/score/earned_by_{agent}", score)


@pytest.fixture(scope="session")
def client(runs: Path) -> TestClient:
    return opened_at(runs)


def opened_at(root: Path) -> TestClient:
    """A browser that has opened the link."""
    client = TestClient(create_view(root, KEY), base_url="http://127.0.0.1")
    assert client.get("/", params={"open": KEY}).status_code == 200
    return client
