"""Training files for the server's tests."""

from __future__ import annotations

import json
from typing import Any

import openai
from openai.types.fine_tuning import FineTuningJob

ASK = {"role": "user", "content": "what is 1 + 2?"}
YES, NO = {"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "no"}
FINAL = ("succeeded", "failed", "cancelled")


def supervised_rows(count: int = 8) -> list[dict[str, Any]]:
    return [{"messages": [ASK, YES]} for _ in range(count)]


def dpo(count: int = 8) -> list[dict[str, Any]]:
    row = {"input": {"messages": [ASK]}, "preferred_output": [YES], "non_preferred_output": [NO]}
    return [row for _ in range(count)]


def grpo(client: openai.OpenAI, model: str, groups: int = 2) -> list[dict[str, Any]]:
    """Groups that the server itself sampled; half of the answers are worth something."""
    rows = []
    for seed in range(groups):
        answer = client.chat.completions.create(
            model=model,
            messages=[ASK],  # type: ignore[list-item]
            n=4,
            seed=seed,
            max_tokens=6,
            logprobs=True,
            extra_body={"return_token_ids": True},
        ).model_dump()
        trajectories = [
            {
                "turns": [
                    {
                        "context_ids": answer["prompt_token_ids"],
                        "token_ids": choice["token_ids"],
                        "logprobs": [token["logprob"] for token in choice["logprobs"]["content"]],
                    }
                ],
                "reward": float(choice["index"] % 2),
            }
            for choice in answer["choices"]
        ]
        rows.append({"trajectories": trajectories})
    return rows


def upload(client: openai.OpenAI, rows: list[dict[str, Any]], name: str = "train.jsonl") -> str:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    return client.files.create(file=(name, content), purpose="fine-tune").id


def create(client: openai.OpenAI, file: str, method: str = "supervised", **options: Any) -> FineTuningJob:
    """A job with the given hyperparameters, a fixed seed, and the options of the API under `request`."""
    request = options.pop("request", {})
    how: Any = {"type": method, method: {"hyperparameters": options}}
    request = {"model": "tiny", "training_file": file, "method": how, "seed": 5} | request
    return client.fine_tuning.jobs.create(**request)


def wait(client: openai.OpenAI, job: str, *states: str, seconds: float = 400) -> FineTuningJob:
    """The job once it is over, or in one of `states`."""
    import time

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = client.fine_tuning.jobs.retrieve(job)
        if found.status in (states or FINAL):
            return found
        assert found.status not in FINAL, found
        time.sleep(0.1)
    raise AssertionError(f"still {found.status}")


def messages(client: openai.OpenAI, job: str) -> list[str]:
    """The messages of the events, oldest first."""
    return [event.message for event in client.fine_tuning.jobs.list_events(job, limit=100)][::-1]


def wait_for_step(client: openai.OpenAI, job: str, step: int) -> None:
    """Until an event tells of the step."""
    import time

    for _ in range(6000):
        if any(text.startswith(f"Step {step}/") for text in messages(client, job)):
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} never came: {messages(client, job)}")
