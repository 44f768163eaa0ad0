"""The one line of a config, with the real verifiers: what follows from it, and what it needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.config.import_path import make_importable
from etude.config.load import parse_config
from etude.integrations.verifiers.environment import missing_parts
from tests.integrations.verifiers import environments
from tests.support import needs

pytestmark = [pytest.mark.verifiers, needs("verifiers")]


@pytest.fixture(autouse=True)
def project(tmp_path: Path) -> Iterator[None]:
    """A user's folder with two environments as modules."""
    before = list(sys.path)
    for name, text in {"sums_env": environments.SUMS, "two_roles_env": environments.TWO_ROLES}.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        sys.modules.pop(name, None)
    make_importable(tmp_path)
    yield
    sys.path[:] = before


def config(environment: Any, *models: str, **workflow: Any) -> Any:
    """A config that trains, whose only line about the task is the environment."""
    return parse_config(
        {
            "llms": {name: {"_type": "local", "model": "base"} for name in models},
            "workflow": {"_type": "verifiers", "environment": environment, **workflow},
            "trajectory_builders": {"grpo": {"_type": "grpo"}},
            "trainer_adapters": {"local": {"_type": "local"}},
            "finetuning": {"enabled": True}
            | ({"targets": {name: {} for name in models}} if len(models) > 1 else {}),
        }
    )


def test_dataset_rewards_and_metrics_follow_from_one_line():
    parsed = config("sums_env", "policy")
    assert list(parsed.eval.evaluators) == ["reward", "correct", "short", "letters"]
    assert parsed.finetuning.reward_function.name == "reward"
    assert parsed.eval.general.dataset.split == "train"
    assert parsed.finetuning.run_configuration.validation_dataset.split == "validation"
    assert parsed.finetuning.target_functions == ["*"]


def test_each_role_has_a_model_and_a_reward_of_its_own():
    models = {"proposer": "alice", "checker": "bob"}
    parsed = config("two_roles_env", "alice", "bob", models=models, own_rewards=True)
    assert dict(parsed.workflow.agents()) == models
    rewards = {name: block.reward_function.name for name, block in parsed.finetuning.targets.items()}
    assert rewards == {"alice": "proposer_reward", "bob": "checker_reward"}
    assert parsed.eval.evaluators["checker_reward"].agent == "checker"


def test_a_missing_program_or_key_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("PRIME_API_KEY", raising=False)
    monkeypatch.setenv("MY_JUDGE_KEY", "secret")

    def missing(**block: Any) -> str:
        named = missing_parts({"taskset": {"id": "sums_env"}, **block})
        assert "secret" not in str(named)
        return "\n".join(named)

    judged = {"id": "sums_env", "task": {"judges": [{"id": "reference", "api_key_var": "MY_JUDGE_KEY"}]}}
    assert missing() == missing(taskset=judged) == ""
    assert missing(agent={"runtime": {"type": "docker"}}).startswith("docker for the agent 'agent' is not")
    remote = {"harness": {"id": "bash"}, "runtime": {"type": "prime"}}
    assert "the key of the prime sandbox for the agent 'agent' is not set" in missing(agent=remote)
    stock = {"harness": {"id": "codex"}, "runtime": {"type": "subprocess"}}
    assert "uv for the harness 'codex' of the agent 'agent' is not installed" in missing(agent=stock)
    asked = {"client": {"type": "eval", "api_key_var": "NO_SUCH_KEY"}}
    assert "export NO_SUCH_KEY=…" in missing(agent=asked)
