from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from etude.core.call import Call, ChatRequest, Completion, Sampling, Usage
from etude.core.episode import EpisodeRecord, Event, Example, Failure
from etude.store.encode import decode_call, decode_episode, encode_call, encode_episode, parent_name

texts = st.text(max_size=6)
token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(tuple)
messages = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool", "system"]), "content": texts})
tools = st.lists(
    st.fixed_dictionaries({"type": st.just("function"), "function": st.dictionaries(texts, texts)})
)
samplings = st.builds(
    Sampling,
    temperature=st.just(0.0) | st.floats(1e-6, 2),
    top_p=st.floats(0.01, 1),
    max_tokens=st.none() | st.integers(1, 100),
    stop=st.lists(texts, max_size=2).map(tuple),
    seed=st.none() | st.integers(0, 2**62),
)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    ids = draw(st.none() | token_ids)
    logprobs = None if ids is None else draw(st.tuples(*[st.floats(max_value=0, allow_nan=False)] * len(ids)))
    return Completion(
        message={"role": "assistant", "content": draw(st.none() | texts)},
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        prompt_ids=draw(st.none() | token_ids),
        completion_ids=ids,
        logprobs=logprobs,
        usage=Usage(3, 4),
        model_version=draw(st.integers(0, 9)),
        drifted=draw(st.booleans()),
        fault=draw(st.sampled_from(["", "role tool: rewritten"])),
    )


@st.composite
def calls(draw: st.DrawFn, *, after: Call | None = None) -> Call:
    """A call; after another one it may go on with its messages and its tokens, or with a part of them."""
    said: tuple[object, ...] = ()
    seen: tuple[int, ...] = ()
    completion = draw(completions())
    if after is not None and after.completion is not None:
        said = (*after.request.messages, after.completion.message)
        said = said[: draw(st.integers(0, len(said)))]
        seen = (after.completion.prompt_ids or ()) + (after.completion.completion_ids or ())
        seen = seen[: draw(st.integers(0, len(seen)))]
    if completion.prompt_ids is not None:
        completion = replace(completion, prompt_ids=seen + completion.prompt_ids)
    request = ChatRequest(
        messages=(*said, *draw(st.lists(messages, min_size=1, max_size=3))),
        tools=after.request.tools if after and draw(st.booleans()) else tuple(draw(tools)),
        sampling=draw(samplings),
        key=draw(st.integers(0, 2**63 - 1)),
        conversation="episode",
    )
    return Call(draw(st.integers(0, 99)), draw(texts), "policy", request, completion)


@given(st.data())
def test_a_call_comes_back_exactly(data: st.DataObject) -> None:
    parent = data.draw(st.none() | calls())
    call = data.draw(calls(after=parent))
    stored = json.loads(json.dumps(encode_call(call, None if parent is None else ("name/0", parent))))
    assert parent_name(stored) == (None if parent is None else "name/0")
    assert decode_call(stored, "episode", parent) == call


def test_what_a_conversation_repeats_is_stored_once() -> None:
    long = {"role": "user", "content": "word " * 1000}
    answer = {"role": "assistant", "content": "answer"}
    first = Call(0, "f", "m", ChatRequest((long,)), Completion(answer, prompt_ids=tuple(range(1000))))
    request = ChatRequest((long, answer, {"role": "user", "content": "and?"}))
    second = Call(1, "f", "m", request, Completion(answer, prompt_ids=tuple(range(1010))))
    assert len(json.dumps(encode_call(first, None))) > 9000
    stored = encode_call(second, ("first/0", first))
    assert len(json.dumps(stored)) < 500
    assert decode_call(json.loads(json.dumps(stored)), "", first) == second


def test_an_episode_comes_back_with_its_failed_calls_inline() -> None:
    request = ChatRequest(({"role": "user", "content": "a"},))
    made = Call(0, "f", "m", request, Completion({"role": "assistant"}))
    failed = replace(made, index=1, completion=None, error="refused")
    record = EpisodeRecord(
        id="train/1/0",
        example=Example("1", {"question": "a"}, ["b", 2]),
        generation=3,
        calls=(made, failed),
        events=(Event("step_reward", 0, 0.5, "good"), Event("note", -1, None, "text")),
        output={"answer": [1, 2.5, None]},
        failure=Failure("raised", "why"),
        seconds=1.5,
    )
    stored = json.loads(json.dumps(encode_episode(record, {0: "abc/0"})))
    assert stored["calls"][0] == "abc/0"
    assert stored["calls"][1]["error"] == "refused"
    assert decode_episode(stored, record.calls, None) == record


def test_examples_that_json_cannot_hold_are_described() -> None:
    picture = object()
    record = EpisodeRecord("e", Example("1", {"picture": picture, "question": "what?"}), 0)
    stored = json.loads(json.dumps(encode_episode(record, {})))
    assert "object object at" in stored["example"]["inputs"]["picture"]
    assert decode_episode(stored, (), record.example).example.inputs["picture"] is picture
