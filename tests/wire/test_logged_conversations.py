"""Which calls of a log are one chat, by golden files, and that no row makes it crash.

The logs are as the formats' own documentation shows them; examples/logs converts those that are not OpenAI's.
The files of chats are written anew by `python -m tests.wire.test_logged_conversations`.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from etude.core.call import ChatRequest, Completion
from etude.core.episode import EpisodeRecord
from etude.core.errors import DatasetError, RequestError
from etude.core.secrets import MASK
from etude.wire.logged_chats import LoggedCall, SkippedEntry
from etude.wire.trace_importing import Log, read_log
from tests.support import drawn

LOGS = Path(__file__).parent / "logs"
FILES = sorted(path for path in LOGS.iterdir() if not path.name.endswith(".chats.json"))
QUESTION = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
MORE = {"role": "user", "content": "And?"}


def call(*messages: dict[str, Any], answer: str = "Hello", **facts: Any) -> LoggedCall:
    said = Completion({"role": "assistant", "content": answer})
    return LoggedCall("log:1", ChatRequest(messages), said, **facts)


def lengths(*records: Any) -> list[int]:
    log = Log()
    log.add(records)
    return [*map(len, log.chats())]


def test_a_prompt_that_goes_on_with_a_chat_is_of_it():
    later = call(QUESTION, ANSWER, MORE)
    assert lengths(call(QUESTION), later) == [2]
    assert lengths(call(QUESTION, trace="a"), call(QUESTION, ANSWER, MORE, trace="b")) == [2]
    assert lengths(call(QUESTION, answer="Bye"), later) == [1, 1]
    assert lengths(call(QUESTION), later, later) == [2, 1], "it is resumed once"


def test_the_times_decide_on_the_order_where_all_are_known():
    assert lengths(call(QUESTION, ANSWER, MORE, began=2.0), call(QUESTION, began=1.0)) == [2]
    assert lengths(call(QUESTION, ANSWER, MORE), call(QUESTION, began=1.0)) == [1, 1]


def test_what_forms_no_chat_is_counted():
    log = Log()
    log.add([call(QUESTION, id="c"), SkippedEntry("log:2", "nothing"), call(QUESTION, id="c")])
    assert len(log.chats()) == 1
    assert log.left_out == {"nothing": (1, "log:2"), "call whose id occurs twice": (1, "log:1")}


def test_chats_that_began_alike_are_of_one_example(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    rows = [{"messages": [QUESTION, {"role": "assistant", "content": text}]} for text in ("a", "b", "a")]
    other = {"messages": [MORE, ANSWER], "expected": "Hello"}
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, other]), encoding="utf-8")
    episodes, imported = read_log([path], hold_out=0)
    assert [episode.generation for episode in episodes] == [0, 1, 2, 0]
    assert (imported.prompts, imported.compared) == (2, 1)
    assert episodes[-1].example.expected == "Hello"
    assert episodes[0].example.inputs == {"messages": [QUESTION]}


def test_secrets_are_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SHOP_API_KEY", "k-8871-very-secret")
    path = tmp_path / "log.jsonl"
    asked = {"role": "user", "content": "My key is k-8871-very-secret"}
    path.write_text(json.dumps({"messages": [asked, ANSWER]}), encoding="utf-8")
    (episode,), _ = read_log([path])
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


@settings(max_examples=drawn(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps(row) + "\n", encoding="utf-8")
    try:
        read_log([log])
    except DatasetError as error:
        assert str(error).startswith(f"{log}:1")
    except RequestError as error:
        assert "no chats" in str(error)
    try:
        read_log([log], skip_broken=True)
    except RequestError as error:
        assert "no chats" in str(error)


def openai_log(log: Path, folder: Path) -> Path:
    """The log in OpenAI's format."""
    if log.name == "openai.jsonl":
        return log
    spec = importlib.util.spec_from_file_location("convert", LOGS.parents[2] / "examples/logs/convert.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = folder / "log.jsonl"
    made.write_text("".join(json.dumps(row) + "\n" for row in module.converted(log)), encoding="utf-8")
    return made


def described(log: Path, folder: Path) -> dict[str, Any]:
    """All that is known of the chats of a log, and what was left out of it."""
    episodes, imported = read_log([openai_log(log, folder)], hold_out=0)
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
            }
        )
    scores = [[event.name, event.value, event.text] for event in episode.events]
    return {"calls": calls, "scores": scores, "output": episode.output}


def golden(log: Path) -> Path:
    return log.with_name(f"{log.name}.chats.json")


@pytest.mark.parametrize("log", FILES, ids=lambda log: log.name)
def test_a_log_has_the_chats_that_its_golden_file_has(log: Path, tmp_path: Path):
    assert described(log, tmp_path) == json.loads(golden(log).read_text(encoding="utf-8"))


def test_a_list_is_read_as_the_lines_are(tmp_path: Path):
    listed = tmp_path / "log.json"
    listed.write_text(json.dumps(ROWS, indent=1), encoding="utf-8")
    assert read_log([listed])[0] == read_log([LOGS / "openai.jsonl"])[0]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "3:1: broken JSON"),
        ("[1]", "3: a row must be an object, found a list"),
        ('{"prompt": "Hi"}', "3: a row must have `messages`, or a `request` and its `response`"),
        ('{"messages": "Hi"}', "3: messages: Input should be a valid list"),
        ('{"messages": [{"role": "robot"}]}', "3: messages[0].role must be one of system, developer, user"),
        ('{"messages": [{"role": "user", "content": 5}]}', "3: messages[0].content must be a string"),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}',
            "3: messages[0].tool_calls must be a list of calls, each of a function with a name",
        ),
        (
            '{"request": {"messages": [{"role": "tool"}], "temperature": -1}, "response": {}}',
            "3: messages[0].content is missing",
        ),
        (
            '{"request": {"messages": [{"role": "user", "content": "a"}]}, "response": {"choices": [{}]}}',
            "3: response: malformed answer: KeyError: 'message'",
        ),
        ('{"request": "[{", "response": {}}', "3: request: "),
    ],
)
def test_a_row_that_is_wrong_is_named_with_its_line(line: str, problem: str, tmp_path: Path):
    log = tmp_path / "log.jsonl"
    right = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
    log.write_text(f"{right}\n\n{line}\n", encoding="utf-8")
    with pytest.raises(DatasetError) as raised:
        read_log([log])
    assert str(raised.value).startswith(f"{log}:{problem}") and "--skip-broken" in str(raised.value)
    episodes, imported = read_log([log], skip_broken=True)
    assert len(episodes) == 1 and [count for count, _ in imported.left_out.values()] == [1]


if __name__ == "__main__":
    for each in FILES:
        with tempfile.TemporaryDirectory() as made:
            text = json.dumps(described(each, Path(made)), indent=1, ensure_ascii=False)
        golden(each).write_text(text + "\n", encoding="utf-8")
