"""Which calls of a log are one chat, which chats are compared, and that no row of any kind makes it crash."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from etude.core.errors import DatasetError, RequestError
from etude.core.secrets import MASK
from etude.traces.importing import Log, read_log
from etude.traces.record import LeftOut, LoggedCall, LoggedScore
from tests.traces.test_formats import FILES

QUESTION = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
MORE = {"role": "user", "content": "And?"}


def call(*messages: dict[str, Any], answer: str | None = "Hello", **facts: Any) -> LoggedCall:
    said = None if answer is None else {"role": "assistant", "content": answer}
    return LoggedCall("log:1", messages, said, **facts)


def lengths(*records: Any) -> list[int]:
    log = Log()
    log.add(records)
    return [len(chat.calls) for chat in log.chats()]


def test_a_prompt_that_goes_on_with_a_chat_is_of_it():
    later = call(QUESTION, ANSWER, MORE)
    assert lengths(call(QUESTION), later) == [2]
    assert lengths(call(QUESTION, trace="a"), call(QUESTION, ANSWER, MORE, trace="b")) == [2]
    assert lengths(call(QUESTION, answer="Bye"), later) == [1, 1]
    assert lengths(call(QUESTION), later, later) == [2, 1], "it is gone on with once"


def test_the_times_decide_on_the_order_where_all_are_known():
    assert lengths(call(QUESTION, ANSWER, MORE, began=2.0), call(QUESTION, began=1.0)) == [2]
    assert lengths(call(QUESTION, ANSWER, MORE), call(QUESTION, began=1.0)) == [1, 1]


def test_feedback_goes_to_the_chat_of_its_call_or_trace():
    log = Log()
    log.add([call(QUESTION, id="c", trace="t"), LeftOut("log:2", "nothing")])
    log.add([LoggedScore("log:3", "good", 1.0, call="c"), LoggedScore("log:4", "fast", 0.0, trace="t")])
    log.add([LoggedScore("log:5", "good", 0.0, call="d"), call(QUESTION, id="c")])
    (chat,) = log.chats()
    assert [score.name for score in chat.scores] == ["good", "fast"]
    assert log.left_out == {
        "nothing": (1, "log:2"),
        "call that is there twice, by its id": (1, "log:1"),
        "feedback 'good' on a call that is not in the log": (1, "log:5"),
    }


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


ROWS = [
    row
    for file in FILES
    for row in (
        map(json.loads, file.read_text(encoding="utf-8").splitlines())
        if file.suffix == ".jsonl"
        else [json.loads(file.read_text(encoding="utf-8"))]
    )
]
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


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
