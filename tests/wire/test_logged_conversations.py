"""Which calls of a log are one chat, by golden files, and that no row makes it crash.

`python -m tests.wire.test_logged_conversations` writes the golden files anew.
"""

import copy
import importlib.util
import json
import random
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from etude.core.episode import EpisodeRecord
from etude.core.errors import DatasetError, RequestError
from etude.core.secrets import MASK
from etude.wire.logged_chats import read_log
from tests.support import draws

LOGS = Path(__file__).parent / "logs"
FILES = sorted(path for path in LOGS.iterdir() if not path.name.endswith(".chats.json"))
QUESTION = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
MORE = {"role": "user", "content": "And?"}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("trace", ["a", 0])
def test_rows_of_one_trace_are_one_chat(tmp_path: Path, trace: str | int):
    first = {"messages": [QUESTION, ANSWER], "trace_id": trace, "score": 1}
    second = {"messages": [QUESTION, ANSWER, MORE, ANSWER], "trace_id": trace, "feedback": 0.5}
    episodes, imported = read_log([write(tmp_path / "log.jsonl", first, {**first, "trace_id": "b"}, second)])
    assert [len(episode.calls) for episode in episodes] == [3, 1]
    assert imported.scores == {"score": 2, "feedback": 1}


def test_chats_that_began_alike_are_of_one_example(tmp_path: Path):
    rows = [{"messages": [QUESTION, {"role": "assistant", "content": text}]} for text in ("a", "b", "a")]
    other = {"messages": [MORE, ANSWER], "expected": "Hello"}
    episodes, imported = read_log([write(tmp_path / "log.jsonl", *rows, other)], hold_out=0)
    assert [episode.generation for episode in episodes] == [0, 1, 2, 0]
    assert (imported.prompts, imported.compared) == (2, 1)
    assert episodes[-1].example.expected == "Hello"
    assert episodes[0].example.inputs == {"messages": [QUESTION]}


def test_secrets_are_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SHOP_API_KEY", "k-8871-very-secret")
    asked = {"role": "user", "content": "My key is k-8871-very-secret"}
    (episode,), _ = read_log([write(tmp_path / "log.jsonl", {"messages": [asked, ANSWER]})])
    assert "k-8871" not in str(episode) and MASK in str(episode)


ROWS = [*map(json.loads, (LOGS / "openai.jsonl").read_text(encoding="utf-8").splitlines())]
WEIRD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=4),
    st.sampled_from(
        ["{", "[]", "[1]", '{"a": {}}', "[[[]]]", "\ud7ff", "NaN", "1e999", "2025-13-45", "\x00"]
    ),
    st.lists(st.integers(0, 2), max_size=2),
    st.dictionaries(st.sampled_from(["role", "a.b", "a", "0", "", "message"]), st.integers(0, 2), max_size=2),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in a row."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, inner in items for found in places(inner, (*path, key)))]


@settings(max_examples=draws(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), values=st.lists(WEIRD, min_size=1, max_size=3))
@example(seed=0, values=[{"a.b": 1, "a": 2}])
def test_a_row_with_anything_in_it_is_read_or_named_with_its_line(
    seed: int, values: list[Any], tmp_path: Path
):
    chance = random.Random(seed)
    row = copy.deepcopy(chance.choice(ROWS))
    for value in values:
        *path, last = chance.choice(places(row)) or (None,)
        if last is None:
            continue
        place = row
        for key in path:
            place = place[key]
        place[last] = value
    log = write(tmp_path / "log.jsonl", row)
    try:
        read_log([log])
    except DatasetError as error:
        assert str(error).startswith(f"{log}:1")
    except RequestError as error:
        assert "no chats" in str(error) and f"{log}:1" in str(error)


def openai_log(log: Path, folder: Path) -> Path:
    """The log in OpenAI's format."""
    if log.name == "openai.jsonl":
        return log
    spec = importlib.util.spec_from_file_location("convert", LOGS.parents[2] / "examples/logs/convert.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return write(folder / "log.jsonl", *module.convert_log(log))


def describe(log: Path, folder: Path) -> dict[str, Any]:
    """All that is known of the chats of a log, and what was left out of it."""
    episodes, imported = read_log([openai_log(log, folder)], hold_out=0)
    left_out = {reason: row["count"] for reason, row in imported.left_out.items()}
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
                "usage": usage,
                "finish_reason": None if answer is None else answer.finish_reason,
            }
        )
    scores = [[event.name, event.value] for event in episode.events]
    return {"calls": calls, "scores": scores, "output": episode.output}


def golden(log: Path) -> Path:
    return log.with_name(f"{log.name}.chats.json")


@pytest.mark.parametrize("log", FILES, ids=lambda log: log.name)
def test_a_log_has_the_chats_that_its_golden_file_has(log: Path, tmp_path: Path):
    assert describe(log, tmp_path) == json.loads(golden(log).read_text(encoding="utf-8"))


def test_a_list_is_read_as_the_lines_are(tmp_path: Path):
    listed = tmp_path / "log.json"
    listed.write_text(json.dumps(ROWS, indent=1), encoding="utf-8")
    assert read_log([listed])[0] == read_log([LOGS / "openai.jsonl"])[0]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ([1], "the request .* JSON object"),
        ({"prompt": "Hi"}, "a row .* `messages`, .* `request` .* `response`"),
        ({"messages": [{"role": "robot"}]}, r"messages\[0\]\.role: Input "),
        ({"messages": [QUESTION, {"role": "assistant", "content": ""}]}, "an answer .* empty"),
        ({"messages": [QUESTION, ANSWER], "score": "good"}, "score: .* number"),
        ({"request": {"messages": [QUESTION]}, "response": {"choices": [{}]}}, "response: malformed answer"),
        ({"request": {"messages": [QUESTION]}, "response": {"error": "busy"}}, "a response .* choices"),
    ],
)
def test_a_row_that_is_wrong_is_counted_with_its_line(row: Any, problem: str, tmp_path: Path):
    log = write(tmp_path / "log.jsonl", {"messages": [QUESTION, ANSWER]}, row, row)
    episodes, imported = read_log([log])
    [(reason, counted)] = imported.left_out.items()
    assert re.match(problem, reason) and counted == {"count": 2, "first": f"{log}:2"}
    assert len(episodes) == 1


def test_a_line_that_is_not_json_is_named(tmp_path: Path):
    (log := tmp_path / "log.jsonl").write_text("\n{", encoding="utf-8")
    with pytest.raises(DatasetError, match=r"log\.jsonl:2:1: broken JSON"):
        read_log([log])


if __name__ == "__main__":
    for each in FILES:
        with tempfile.TemporaryDirectory() as made:
            text = json.dumps(describe(each, Path(made)), indent=1, ensure_ascii=False)
        golden(each).write_text(text + "\n", encoding="utf-8")
