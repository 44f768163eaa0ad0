"""An episode: its calls and events, and how it is encoded."""

import asyncio
import json
from dataclasses import replace

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from etude.core.call import Call, ChatRequest, Completion, Constraint, Sampling, Usage
from etude.core.episode import EpisodeRecord, Event, Example
from etude.core.errors import EngineError, RequestError
from etude.rollout.collector import EpisodeJob
from etude.rollout.episode import Episode
from etude.rollout.recorder import function
from etude.store.episodes import decode_call, encode_call, encode_episode, parent_name, read_episode
from etude.store.journal import Journal
from tests.rollout.running import collect_one, examples
from tests.support import EchoEngine, ScriptedEngine, draws

ASK = [{"role": "user", "content": "hi"}]


async def test_chat_gives_text_tokens_and_logprobs_and_records_them(journal: Journal) -> None:
    replies = []

    async def play(example, episode):
        replies.append(await episode.chat([{"role": "user", "content": example.inputs["question"]}]))
        return replies[0].text

    record = await collect_one(play, journal, engine=ScriptedEngine(["forty-two"]))
    [reply], [call] = replies, record.calls
    assert record.output == reply.text == "forty-two"
    assert reply.message == {"role": "assistant", "content": "forty-two"}
    assert reply.finish_reason == "stop"
    assert reply.token_ids == call.completion.completion_ids
    assert reply.logprobs == call.completion.logprobs
    assert call.request.messages == ({"role": "user", "content": "What is 0?"},)
    assert (call.index, call.model, call.function) == (0, "policy", "<workflow>")
    assert call.request.conversation == record.id


async def test_sampling_is_the_configs_then_the_agents_then_the_evaluations(journal: Journal) -> None:
    async def play(example, episode):
        await episode.chat(ASK, temperature=0.5, stop="END")
        return "done"

    configured = {"policy": Sampling(temperature=0.9, max_tokens=64)}
    trained = await collect_one(play, journal, sampling=configured)
    assert trained.calls[0].request.sampling == Sampling(0.5, 1.0, 64, ("END",))
    work = [EpisodeJob("eval/0/0", examples(1)[0], sampling={"temperature": 0})]
    greedy = await collect_one(play, journal, sampling=configured, work=work)
    assert greedy.calls[0].request.sampling == Sampling(0.0, 1.0, 64, ("END",))


async def test_the_same_question_twice_is_sampled_twice(journal: Journal) -> None:
    async def play(example, episode):
        return [(await episode.chat(ASK)).text for _ in range(3)]

    assert len(set((await collect_one(play, journal)).output)) == 3


async def test_engines_are_shown_the_earlier_calls_to_their_model(journal: Journal) -> None:
    async def play(example, episode):
        for model in ("a", "b", "a", "a"):
            await episode.chat(ASK, model=model)
        return "done"

    models = {"a": EchoEngine(), "b": EchoEngine()}
    record = await collect_one(play, journal, models=models)
    earlier = [[call.index for call in request.earlier] for request in models["a"].requests]
    assert earlier == [[], [0], [0, 2]]
    assert [list(request.earlier) for request in models["b"].requests] == [[]]
    assert all(call.request.earlier == () for call in record.calls)


async def test_what_an_agent_does_to_its_messages_later_does_not_change_the_record(journal: Journal) -> None:
    async def play(example, episode):
        messages = [{"role": "user", "content": "before"}]
        reply = await episode.chat(messages)
        messages[0]["content"] = "after"
        reply.message["content"] = "made up"
        example.inputs["question"] = "changed"
        return "done"

    record = await collect_one(play, journal, engine=ScriptedEngine(["said"]))
    assert record.calls[0].request.messages[0]["content"] == "before"
    assert record.calls[0].completion.message["content"] == "said"
    assert record.example.inputs["question"] == "What is 0?"


async def test_step_rewards_and_notes_know_which_call_they_follow(journal: Journal) -> None:
    async def play(example, episode):
        episode.note("begin")
        await episode.chat(ASK)
        episode.step_reward(0.5, "good move")
        await episode.chat(ASK)
        episode.step_reward(numpy.array(-1, dtype="float32"))
        return "done"

    record = await collect_one(play, journal)
    assert record.events == (
        Event("note", -1, None, "begin"),
        Event("step_reward", 0, 0.5, "good move"),
        Event("step_reward", 1, -1.0, ""),
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", None, [1], 1j])
async def test_a_step_reward_must_be_a_finite_number(journal: Journal, value: object) -> None:
    async def play(example, episode):
        episode.step_reward(value)

    record = await collect_one(play, journal)
    assert f"±1e+30, found {value!r} (episode train/0/0)" in record.failure.reason


async def test_calls_belong_to_the_function_that_makes_them(journal: Journal) -> None:
    @function
    async def search(episode):
        await episode.chat(ASK)

    @function(name="planner")
    async def plan(episode):
        await search(episode)
        await episode.chat(ASK)

    async def play(example, episode):
        await plan(episode)
        await asyncio.gather(search(episode), episode.chat(ASK))
        with episode.function("writer"):
            await episode.chat(ASK)
        with episode.function("reader"):
            await episode.chat(ASK)
        await episode.chat(ASK)
        return "done"

    record = await collect_one(play, journal)
    assert [call.function for call in record.calls] == [
        *("search", "planner"),
        *("search", "<workflow>"),
        *("writer", "reader", "<workflow>"),
    ]


@pytest.mark.parametrize(
    ("messages", "options", "told"),
    [
        ("hello", {}, "messages .* list, found 'hello'"),
        ([], {}, "messages .* found none"),
        (["hello"], {}, r"messages\[0\]: .* dict"),
        ([{"role": "user", "content": object()}], {}, r"messages\[0\]: .* builtins\.object"),
        (ASK, {"temperature": -1}, "temperature: .* 0, found -1"),
        (ASK, {"tools": ["add"]}, "tool .* function, found 'add'"),
        (ASK, {"chat_template_kwargs": {"a": b"x"}}, "bytes in a request is not JSON: b'x'"),
        (ASK, {"tools": [{"name": "add"}]}, r"tools\[0\]\.function: Field required"),
    ],
)
async def test_wrong_requests_say_what_is_wrong(journal: Journal, messages, options, told: str) -> None:
    async def play(example, episode: Episode):
        with pytest.raises(RequestError, match=told):
            await episode.chat(messages, **options)
        return "done"

    record = await collect_one(play, journal)
    assert (record.failure, record.calls) == (None, ())


async def call_named(episode: Episode, name) -> None:
    with episode.function(name):
        await episode.chat(ASK)


@pytest.mark.parametrize(
    "use",
    [
        lambda episode: episode.note(5),
        lambda episode: episode.score("x", 1.0, 5),
        lambda episode: episode.score("x", 1.0, agent=5),
        lambda episode: episode.step_reward(1.0, 5),
        lambda episode: call_named(episode, 5),
        lambda episode: episode.tools(5).__aenter__(),
        lambda episode: episode.tools(["x"]).__aenter__(),
        lambda episode: episode.run(["echo", 5]),
        lambda episode: episode.run(["echo"], env={"A": 5}),
        lambda episode: episode.run(["cat"], input=5),
    ],
)
async def test_what_is_no_text_is_refused_where_it_is_given(journal: Journal, use) -> None:
    async def play(example, episode: Episode):
        with pytest.raises(RequestError, match=r"5|\['x'\]"):
            if (waiting := use(episode)) is not None:
                await waiting
        return "done"

    assert (await collect_one(play, journal)).failure is None


async def test_a_failed_call_is_recorded_with_its_reason_and_may_be_caught(journal: Journal) -> None:
    async def play(example, episode):
        try:
            await episode.chat(ASK)
        except EngineError:
            return (await episode.chat(ASK)).text

    record = await collect_one(play, journal, engine=ScriptedEngine([EngineError("prompt too long"), "fine"]))
    assert record.output == "fine"
    assert [call.error for call in record.calls] == ["prompt too long", None]
    assert record.calls[0].completion is None


async def test_a_call_that_the_agent_gives_up_on_is_recorded_as_cancelled(journal: Journal) -> None:
    class Never(EchoEngine):
        async def complete(self, request: ChatRequest):
            await asyncio.Event().wait()

    async def play(example, episode):
        call = asyncio.ensure_future(episode.chat(ASK))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait({call})
        return "went on"

    record = await collect_one(play, journal, engine=Never())
    assert record.output == "went on"
    assert [call.error.split()[0] for call in record.calls] == ["cancelled"]


class _Colour(BaseModel):
    name: str


async def test_a_call_may_ask_for_a_form_a_tool_and_the_templates_options(journal: Journal) -> None:
    offered = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in "ab"]

    async def play(example, episode):
        for response_format in (_Colour, {"type": "json_object"}, {"type": "text"}):
            await episode.chat(ASK, response_format=response_format)
        choice = {"type": "function", "function": {"name": "b"}}
        await episode.chat(ASK, tools=offered, tool_choice=choice)
        await episode.chat(ASK, chat_template_kwargs={"enable_thinking": False})
        with pytest.raises(RequestError, match="response_format: give the type"):
            await episode.chat(ASK, response_format="json")
        with pytest.raises(RequestError, match="no tool 'c'"):
            await episode.chat(ASK, tools=offered, tool_choice=choice | {"function": {"name": "c"}})
        return "done"

    engine = ScriptedEngine(["{}"])
    options = {"policy": {"enable_thinking": True, "effort": "high"}}
    await collect_one(play, journal, engine=engine, template_options=options)
    forms = [request.sampling.constraint for request in engine.requests]
    schema = Constraint("json_schema", json.dumps(_Colour.model_json_schema()))
    assert forms == [schema, Constraint("json_object"), None, None, None]
    assert [request.tool_choice for request in engine.requests[2:4]] == ["auto", "function:b"]
    assert engine.requests[-1].template_options == {"enable_thinking": False, "effort": "high"}


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


@settings(max_examples=draws(10))
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


async def test_examples_that_json_cannot_hold_are_described(journal) -> None:
    picture = object()
    record = EpisodeRecord("e", Example("1", {"picture": picture, "question": "what?"}), 0)
    await journal.put("e", encode_episode(record, {}))
    assert journal.get("e")["example"]["inputs"]["picture"] == "<object object>"
    assert read_episode(journal, "e", record.example).example.inputs["picture"] is picture
