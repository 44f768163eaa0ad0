"""ART's protocol without ART: the requests of its clients, as plain as they are."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai

ASK: list[dict[str, Any]] = [{"role": "user", "content": "yes or no?"}]
RATE = 0.05


def model_of(name: str = "agent", project: str = "p", **internal: Any) -> dict[str, Any]:
    """The model as ART's clients name it; all weights of the tiny one are trained."""
    return {
        "name": name,
        "project": project,
        "entity": None,
        "id": None,
        "config": None,
        "trainable": True,
        "inference_base_url": None,
        "base_path": ".art",
        "base_model": "tiny",
        "_internal_config": {"init_args": None, "engine_args": None, "peft_args": {"r": 0}} | internal,
    }


def choice(*tokens: tuple[str, float], content: str = "yes", **more: Any) -> dict[str, Any]:
    """OpenAI's `Choice`, as pydantic dumps it."""
    named = [{"token": name, "logprob": value, "bytes": None, "top_logprobs": []} for name, value in tokens]
    message = {"role": "assistant", "content": content, "refusal": None, "tool_calls": None}
    logprobs = {"content": named, "refusal": None} if named else None
    return {"index": 0, "finish_reason": "stop", "logprobs": logprobs, "message": message} | more


def trajectory(reward: float, *said: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages_and_choices": [*ASK, *said], "tools": None, "reward": reward, "metrics": {}} | more


def group(*trajectories: dict[str, Any]) -> dict[str, Any]:
    return {"trajectories": list(trajectories), "exceptions": [], "metadata": {}, "logs": []}


def pair(first: float = 1.0, second: float = 0.0) -> dict[str, Any]:
    """A group of two answers of one token each."""
    return group(
        trajectory(first, choice(("token_id:20", -1.0))), trajectory(second, choice(("token_id:21", -1.0)))
    )


def train_body(model: dict[str, Any], *groups: dict[str, Any], **options: Any) -> dict[str, Any]:
    config = {"learning_rate": RATE, "beta": 0.0} | options.pop("config", {})
    body = {"model": model, "trajectory_groups": list(groups), "config": config, "dev_config": {}}
    return body | {"verbose": False} | options


def lines_of(answer: httpx.Response) -> list[dict[str, float]]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def gathered(client: openai.OpenAI, name: str, *, groups: int = 2, seed: int = 0) -> list[dict[str, Any]]:
    """Groups of answers of one token; those that begin with a small letter are worth something."""
    found = []
    for number in range(groups):
        answer = client.chat.completions.create(
            model=name,
            messages=ASK,
            n=64,
            seed=seed + number,
            max_tokens=1,  # type: ignore[arg-type]
        )
        rated = [(float((one.message.content or "")[:1].islower()), one) for one in answer.choices]
        found.append(group(*(trajectory(reward, one.model_dump()) for reward, one in rated)))
    return found


def mean_reward(groups: list[dict[str, Any]]) -> float:
    rewards = [one["reward"] for group in groups for one in group["trajectories"]]
    return float(sum(rewards) / len(rewards))
