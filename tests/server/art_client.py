"""ART's wire without ART: choices, trajectories and groups, as its client writes them."""

from __future__ import annotations

from typing import Any

import openai

ASK: list[dict[str, Any]] = [{"role": "user", "content": "yes or no?"}]


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
