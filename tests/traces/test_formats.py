"""Each format that chats are logged in, by golden files: a log, and beside it the chats that it has.

The logs are as the formats' own documentation shows them. `python -m tests.traces.test_formats` writes the
files of chats anew.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from etude.core.episode import EpisodeRecord
from etude.core.errors import DatasetError
from etude.traces.importing import read_log

LOGS = Path(__file__).parent / "logs"
FILES = sorted(path for path in LOGS.iterdir() if not path.name.endswith(".chats.json"))


def described(log: Path) -> dict[str, Any]:
    """All that is known of the chats of a log, and what was left out of it."""
    episodes, imported = read_log([log], hold_out=0)
    left_out = {reason: count for reason, (count, _) in imported.left_out.items()}
    return {"chats": [*map(chat, episodes)], "left_out": left_out}


def chat(episode: EpisodeRecord) -> dict[str, Any]:
    calls = []
    for call in episode.calls:
        answer, usage = call.completion, None
        if answer is not None:
            usage = [answer.usage.prompt_tokens, answer.usage.completion_tokens]
        calls.append(
            {
                "messages": list(call.request.messages),
                "answer": None if answer is None else answer.message,
                "tools": [tool["function"]["name"] for tool in call.request.tools],
                "model": call.model,
                "sampling": call.request.sampling.changed(),
                "usage": usage,
                "finish_reason": None if answer is None else answer.finish_reason,
                "error": call.error,
                "began": call.began,
                "seconds": round(call.seconds, 6),
            }
        )
    scores = [[event.name, event.value, event.text] for event in episode.events]
    return {"calls": calls, "scores": scores, "output": episode.output}


def golden(log: Path) -> Path:
    return log.with_name(f"{log.name}.chats.json")


@pytest.mark.parametrize("log", FILES, ids=lambda log: log.name)
def test_a_log_has_the_chats_that_its_golden_file_has(log: Path):
    assert described(log) == json.loads(golden(log).read_text(encoding="utf-8"))


def test_gzip_and_a_list_are_read_as_the_lines_are(tmp_path: Path):
    plain = LOGS / "openai.jsonl"
    rows = [json.loads(line) for line in plain.read_text(encoding="utf-8").splitlines()]
    packed = tmp_path / "log.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    listed = tmp_path / "log.json"
    listed.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    assert described(packed) == described(listed) == described(plain)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "broken JSON"),
        ("[1]", "a row must be an object, found a list"),
        (
            '{"prompt": "Hi"}',
            "a row of no known format (otlp, langfuse, openai): an object with prompt",
        ),
        ('{"messages": "Hi"}', "messages must be a list, found 'Hi'"),
        ('{"messages": [{"role": "robot"}]}', "messages[0].role must be one of system, developer, user"),
        (
            '{"messages": [{"role": "user", "content": 5}]}',
            "messages[0].content must be text or a list of parts",
        ),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}',
            "messages[0].tool_calls[0] must name its function, found None",
        ),
        (
            '{"request": {"messages": [], "temperature": -1}, "response": {}}',
            "request.temperature: Input should be greater than or equal to 0, found -1",
        ),
        (
            '{"request": {"messages": []}, "response": {"choices": [{}]}}',
            "response.choices[0] must have a message",
        ),
        (
            '{"resourceSpans": [{"scopeSpans": [{"spans": [{"attributes": [{"value": {"int": 1}}]}]}]}]}',
            "an attribute's value must be one of OTLP's kinds, such as stringValue, found int",
        ),
        (
            '{"trace_id": "t", "id": "o", "type": "GENERATION", "input": "[{", "output": "x"}',
            "input is broken JSON",
        ),
    ],
)
def test_a_row_that_is_wrong_is_named_with_its_line(line: str, problem: str, tmp_path: Path):
    log = tmp_path / "log.jsonl"
    right = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
    log.write_text(f"{right}\n\n{line}\n", encoding="utf-8")
    with pytest.raises(DatasetError) as raised:
        read_log([log])
    assert str(raised.value).startswith(f"{log}:3: {problem}") and "--skip-broken" in str(raised.value)
    episodes, imported = read_log([log], skip_broken=True)
    assert len(episodes) == 1 and [count for count, _ in imported.left_out.values()] == [1]


if __name__ == "__main__":
    for each in FILES:
        text = json.dumps(described(each), indent=1, ensure_ascii=False)
        golden(each).write_text(text + "\n", encoding="utf-8")
