"""Agents and evaluators that raise, return what nobody expects, or harm their process.

The other episodes are whole, and each such deed is told: as a failed episode or a missing score.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from etude.run import Run
from tests.cli.projects import process
from tests.processes.deeds import DEEDS, DONE, HARMLESS, OUTPUTS, RAISED, RETURNED
from tests.support import one_quick

WHO = ("agent", "evaluator")
GOOD = 3
"""Episodes in which nothing is done."""
IN_RUNNERS = {"isolation": "process", "runners": 2, "runner_memory": 1.5}


def find_untold(folder: Path, deeds: Iterable[str], workflow: str = "play", **general: Any) -> list[str]:
    """The deeds, done by an agent and by an evaluator, that nothing is said of."""
    done = [(who, deed) for deed in deeds for who in WHO]
    rows = [{"id": f"good{number}", "deed": "", "who": "nobody"} for number in range(GOOD)]
    rows += [{"id": f"{who}: {deed}", "deed": deed, "who": who} for who, deed in done]
    (folder / "examples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "llms": {"policy": {"_type": "tests.cli.parts:open_scripted"}},
        "workflow": f"tests.processes.deeds:{workflow}",
        "eval": {
            "general": {"dataset": "examples.jsonl", "timeout": 3, "max_concurrency": 2, **general},
            "evaluators": {"score": "tests.processes.deeds:score"},
        },
        "finetuning": {"error_budget": 1.0},
    }
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    running = process("evaluate", "config.yml", "--name", "e", folder=folder)
    _, errors = running.communicate(timeout=240)
    assert running.wait() == 0, errors
    episodes = {episode.example.id: episode for episode in Run(folder / "runs" / "e").episodes}
    lines = (folder / "runs" / "e" / "items.jsonl").read_text().splitlines()
    scores = {row["id"]: row["scores"]["score"] for row in map(json.loads, lines)}
    assert episodes.keys() == scores.keys() == {row["id"] for row in rows}
    for number in range(GOOD):
        assert (episodes[f"good{number}"].failure, scores[f"good{number}"]) == (None, 0.5)
    return [name for name in scores if episodes[name].failure is None and scores[name] is not None]


def harmless(deeds: Iterable[str]) -> set[str]:
    found = {f"{who}: {deed}" for who in WHO for deed in deeds if deed in HARMLESS}
    return found | {f"agent: {deed}" for deed in deeds if deed in OUTPUTS}


@pytest.mark.parametrize(
    ("workflow", "general"), one_quick(("play", {}), ("play", IN_RUNNERS), ("play_in_a_thread", {}))
)
def test_what_is_raised_or_returned_is_told(tmp_path: Path, workflow: str, general: dict[str, Any]):
    deeds = RAISED | RETURNED | OUTPUTS
    good = {f"good{number}" for number in range(GOOD)}
    assert set(find_untold(tmp_path, deeds, workflow, **general)) - good <= harmless(deeds)


@pytest.mark.slow
@pytest.mark.parametrize("workflow", ["play", "play_in_a_thread"])
@pytest.mark.parametrize("deed", DONE | HARMLESS)
def test_what_harms_the_process_harms_no_other_episode(tmp_path: Path, deed: str, workflow: str):
    assert deed in DEEDS
    good = {f"good{number}" for number in range(GOOD)}
    assert set(find_untold(tmp_path, [deed], workflow, **IN_RUNNERS)) - good <= harmless([deed])
