"""A project whose models are behind an endpoint that charges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.cli.projects import AGENT, rows

PROMPT, CACHED, COMPLETION = 2.0, 0.5, 8.0
"""USD for a million tokens of the policy; the judge costs ten times as much."""


def charged_project(
    folder: Path, url: str, *, judge_url: str = "", examples: int = 40, **changes: Any
) -> Path:
    """The path of its config, of which `changes` are keys. The judge is at `judge_url`, or there too."""

    def model(name: str, factor: float, url: str) -> dict[str, Any]:
        prices = {"prompt": PROMPT * factor, "cached": CACHED * factor, "completion": COMPLETION * factor}
        settings = {"max_tokens": 50, "max_retries": 2, "retry_wait": 0}
        return {"_type": "openai", "model_name": name, "base_url": url, "prices": prices, **settings}

    config: dict[str, Any] = {
        "llms": {"policy": model("policy", 1, url), "judge": model("judge", 10, judge_url or url)},
        "workflow": "agent:play",
        "eval": {
            "general": {"dataset": "train.jsonl", "max_concurrency": 16},
            "evaluators": {
                "correct": "agent:correct",
                "judged": {"_type": "llm_judge", "model": "judge", "prompt": "Good?", "max_tokens": 40},
            },
        },
        "finetuning": {"target_model": "policy"},
        **changes,
    }
    (folder / "agent.py").write_text(AGENT)
    (folder / "train.jsonl").write_text(rows(examples, "t"))
    path = folder / "config.yml"
    path.write_text(yaml.safe_dump(config))
    return path


def bill_in(run: Path) -> dict[str, Any]:
    """The bill as `etude runs show --json` has it, read by another process's means."""
    from etude.budget.bill import read_bill

    return json.loads(json.dumps(read_bill(run).as_json()))
