"""`etude check` and protocols: names of agents, and targets that no agent samples from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.projects import change, etude

CLAIMS = [{"id": f"e{number}", "label": number % 2} for number in range(4)]


def project(folder: Path, **changes: Any) -> str:
    """A config with two models that play `adp` and are both trained, with keys changed: `a__b` is `a.b`."""
    config: dict[str, Any] = {
        "llms": {name: {"_type": "tests.cli.parts:scripted"} for name in ("talker", "judge")},
        "workflow": {
            "_type": "protocol",
            "protocol": "adp",
            "scenario": "tests.protocols.games:Labelled",
            "policies": {"prover": "talker", "verifier": "judge"},
        },
        "eval": {
            "general": {"dataset": "claims.jsonl"},
            "evaluators": {
                "proved": {"_type": "protocol_reward", "agent": "prover"},
                "verified": {"_type": "protocol_reward", "agent": "verifier"},
            },
        },
        "trajectory_builders": {"mine": {"_type": "grpo", "num_generations": 4, "credit": "agent"}},
        "trainer_adapters": {"counting": {"_type": "tests.cli.parts:counting"}},
        "finetuning": {
            "enabled": True,
            "targets": {
                "talker": {"reward_function": {"name": "proved"}},
                "judge": {"reward_function": {"name": "verified"}},
            },
            "run_configuration": {"validation_dataset": "claims.jsonl"},
        },
    }
    (folder / "claims.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CLAIMS))
    (folder / "config.yml").write_text(yaml.safe_dump(config, sort_keys=False))
    change(folder / "config.yml", **changes)
    return (folder / "config.yml").read_text()


def find_line(text: str, words: str) -> int:
    [found] = [number for number, line in enumerate(text.splitlines(), 1) if words in line]
    return found


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


WRONG = [
    ("eval__evaluators__verified__agent", "verifer", "agent: verifer", "eval.evaluators.verified.agent"),
    (
        "trajectory_builders__mine",
        {"_type": "malt", "num_responses": {"prover": 2, "verifer": 3}},
        "verifer: 3",
        "trajectory_builders.mine.num_responses.verifer",
    ),
    ("workflow__widths", {"verifer": [2, 1]}, "verifer:", "workflow.widths.verifer"),
    ("workflow__policies__verifer", "judge", "verifer:", "workflow.policies.verifer"),
    ("finetuning__target_functions", ["*", "verifer"], "- verifer", "finetuning.target_functions.1"),
]


@pytest.mark.parametrize(("key", "value", "words", "path"), WRONG, ids=[path for *_, path in WRONG])
def test_an_unknown_agent_is_found_before_anything_is_sampled(
    folder: Path, key: str, value: Any, words: str, path: str
) -> None:
    text = project(folder, **{key: value})
    shown = etude("check", "config.yml")
    assert shown.exit_code == 2
    output = " ".join((shown.stderr + shown.stdout).split())
    assert f"config.yml:{find_line(text, words)}:" in output
    assert f"{path}: the workflow has no agent 'verifer'; did you mean 'verifier'?" in output


def test_a_target_that_no_agent_samples_from_is_found(folder: Path) -> None:
    project(folder, workflow__policies={"prover": "judge", "verifier": "judge"})
    shown = etude("check", "config.yml")
    assert shown.exit_code == 2
    told = " ".join((shown.stderr + shown.stdout).split())
    assert "finetuning.targets.talker: no agent samples from 'talker'" in told
