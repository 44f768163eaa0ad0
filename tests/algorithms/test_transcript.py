"""Calls of an episode as branches of tokens, each completion in one of them, and as transcripts."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.algorithms.samples import (
    UNTOLD,
    find_branches,
    make_sample,
    require_tokens,
    step_returns,
    targeted_calls,
)
from etude.core.call import Call, ChatRequest, Completion
from etude.core.episode import WORKFLOW, Event
from etude.core.errors import TrainingError
from etude.core.message import message_key
from etude.core.sample import to_trajectory
from etude.core.trajectory import EpisodeItemRole
from tests.algorithms.scripted_episodes import call, conversation, episode, ids
from tests.support import tool_call


def to_items(calls):
    assert len(find_branches(calls)) == 1
    return to_trajectory(make_sample(calls, episode(calls), 0.0)).episode


tokens = st.lists(st.integers(0, 9), max_size=5).map(tuple)


@given(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=6))
def test_concatenated_items_equal_the_last_calls_prompt_and_completion(turns):
    sequence: tuple[int, ...] = ()
    calls, messages = [], []
    for index, (context, completion) in enumerate(turns):
        messages.append({"role": "user", "content": "u"})
        reply = {"role": "assistant", "content": "a"}
        sampled = Completion(
            message=reply,
            prompt_ids=sequence + context,
            completion_ids=completion,
            logprobs=(-0.5,) * len(completion),
        )
        calls.append(Call(index, WORKFLOW, "policy", ChatRequest(tuple(messages)), sampled))
        messages.append(reply)
        sequence += context + completion
    items = to_items(calls)
    assert (
        sum((item.context_ids + item.token_ids for item in items if item.token_ids is not None), ())
        == sequence
    )
    assert [item.role for item in items] == [EpisodeItemRole.USER, EpisodeItemRole.ASSISTANT] * len(turns)


def test_tool_calls_and_results_stay_what_they_were():
    wanted = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    user, asks = (
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": None, "tool_calls": wanted},
    )
    result = {"role": "tool", "content": "2", "tool_call_id": "c1"}
    answers = {"role": "assistant", "content": "It is 2"}
    calls = [
        call(0, [user], asks, "<1+1>", "[add].", function=WORKFLOW),
        call(1, [user, asks, result], answers, "<1+1>[add].(2)", "It is 2."),
    ]
    _, tool_call, tool_result, _ = to_items(calls)
    assert tool_call.role is EpisodeItemRole.ASSISTANT
    assert tool_call.metadata["tool_calls"] == wanted
    assert tool_result.role is EpisodeItemRole.TOOL
    assert (tool_result.content, tool_result.metadata["tool_call_id"]) == ("2", "c1")


def test_assistant_messages_that_the_agent_wrote_itself_are_marked_as_given():
    shots = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "2"},
    ]
    items = to_items([call(0, shots, {"role": "assistant", "content": "two"}, "<shots>", "two.")])
    assert items[1].given and not items[1].is_sampled
    assert items[1].token_ids is None
    assert items[3].token_ids == ids("two.")


def test_a_trajectory_says_where_it_comes_from():
    calls = conversation("a", "b")
    trajectory = to_trajectory(make_sample(calls, episode(calls, generation=3), 0.5, reasoning="fine"))
    assert (trajectory.example_id, trajectory.episode_id) == ("e", "train/1/e/3")
    assert trajectory.reward == 0.5
    assert trajectory.shaped_rewards is None
    assert trajectory.metadata == {
        "id": "e",
        "generation": 3,
        "episode": "train/1/e/3",
        "branch": 0,
        "drifted": False,
        "reasoning": "fine",
    }


@pytest.mark.parametrize(
    ("steps", "reward", "discount", "shaped"),
    [
        ([], 1.0, 0.9, None),
        ([(0, 0.2), (1, 0.4)], 1.0, 0.5, [0.2 + 0.5 * (0.4 + 0.5 * 1.0), 0.4 + 0.5, 1.0]),
        ([(2, 0.5)], 1.0, 0.5, [0.375, 0.75, 1.5]),
        ([(1, 0.1), (1, 0.1)], 0.0, 0.0, [0.0, 0.2, 0.0]),
        ([(-1, 5.0)], 1.0, 0.9, None),
    ],
)
def test_shaped_rewards_are_discounted_returns_of_step_rewards_and_the_final_reward(
    steps, reward, discount, shaped
):
    events = [Event("step_reward", after_call=after, value=value) for after, value in steps]
    found = step_returns(conversation("a", "b", "c", "d", "e", "f"), events, reward, discount)
    assert found == (None if shaped is None else pytest.approx(dict(enumerate(shaped))))


def test_a_step_reward_after_another_agents_call_belongs_to_the_branchs_last_call_before_it():
    events = [Event("step_reward", after_call=1, value=1.0), Event("note", after_call=0, text="unrelated")]
    first, second = conversation("a", "b", "c", "d")
    calls = [first, Call(2, WORKFLOW, "policy", second.request, second.completion)]
    assert step_returns(calls, events, 0.0, 0.0) == {0: 1.0, 2: 0.0}


@pytest.mark.parametrize(
    ("prompt", "completion", "missing"), [(None, None, "token ids"), ("<hi>", "yes.", "logprobs")]
)
def test_missing_tokens_are_an_error_that_says_what_to_do(prompt, completion, missing):
    user, reply = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
    one = call(0, [user], reply, prompt, completion)
    bare = Completion(
        reply, prompt_ids=one.completion.prompt_ids, completion_ids=one.completion.completion_ids
    )
    record = episode([Call(0, WORKFLOW, "policy", one.request, bare)])
    with pytest.raises(TrainingError, match=rf"episode 'train/1/e/0', call 0: .* no {missing}"):
        require_tokens(record, record.calls, logprobs=True)


USER = {"role": "user", "content": "hi"}
REPLY = {"role": "assistant", "content": "yes"}


def shape(calls):
    """Call indices by branch."""
    return [[one.index for one in branch] for branch, _ in find_branches(calls)]


def faults(calls):
    """Why each branch began, where a prompt repeated a conversation in other tokens."""
    return [fault for _, fault in find_branches(calls)]


def test_a_prompt_that_repeats_the_conversation_in_other_tokens_starts_a_branch_and_counts_as_drift():
    first, second = conversation("a", "b", "c", "d")
    again = replace(second, completion=replace(second.completion, prompt_ids=ids("<a>B.<c>")))
    assert shape([first, again]) == [[0], [1]]
    assert faults([first, again]) == ["", UNTOLD]


def test_what_was_written_differently_is_the_engines_word_too():
    one = call(0, [USER], REPLY, "<hi>", "yes.", drifted=True)
    told = replace(one, completion=replace(one.completion, fault="role tool: rewritten"))
    assert faults([told, *conversation("x", "y", start=1)]) == ["role tool: rewritten", ""]


def test_a_branch_that_a_family_begins_on_purpose_is_no_drift():
    first, second = conversation("a", "b", "c", "d")
    anew = replace(second.completion, prompt_ids=ids("<a>B.<c>"), fault="its thinking is left out")
    calls = [first, replace(second, completion=anew)]
    assert shape(calls) == [[0], [1]] and faults(calls) == ["", ""]


def test_two_answers_to_one_prompt_are_two_branches_and_the_shared_call_is_trained_once():
    first, second, third = conversation("a", "b", "c", "d", "e", "f")
    fork = replace(second, index=2, completion=replace(second.completion, completion_ids=ids("other.")))
    assert shape([first, second, fork, replace(third, index=3)]) == [[0, 1, 3], [2]]


def test_only_the_target_functions_calls_to_the_target_model_are_taken():
    calls = [
        *conversation("a", "b"),
        *conversation("c", "d", start=1, function="judge"),
        *conversation("e", "f", start=2, model="other"),
    ]

    def find(functions, model):
        return [one.index for one in targeted_calls(episode(calls), functions, model)]

    assert find((WORKFLOW,), "policy") == [0]
    assert find(("judge",), "policy") == [1]
    assert find((WORKFLOW,), None) == [0, 2]
    assert find(("*",), "policy") == [0, 1]


def test_without_token_ids_the_messages_decide():
    first, anew = (call(0, [USER], REPLY, None, None), call(1, [USER, USER], REPLY, None, None))
    assert shape([first, call(1, [USER, REPLY, USER], REPLY, None, None)]) == [[0, 1]]
    assert shape([first, anew]) == [[0], [1]]


def test_spaces_in_the_arguments_of_calls_do_not_make_a_branch() -> None:
    said, sent = (tool_call("add", arguments) for arguments in ('{"a": 1,  "b": "x y"}', '{"a":1,"b":"x y"}'))
    assert message_key(said) == message_key(sent)
    assert message_key(said) != message_key(tool_call("add", '{"a":1,"b":"xy"}'))
    assert message_key(tool_call("add", "{a")) != message_key(tool_call("add", "{ a"))
    assert message_key(tool_call("add", {"a": 1, "b": "x y"})) == message_key(said), (
        "as some agents send them"
    )


few_tokens = st.lists(st.integers(0, 3), max_size=4).map(tuple)
turns = st.lists(st.tuples(few_tokens, few_tokens), min_size=1, max_size=6)


@given(st.lists(turns, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_every_completion_is_in_exactly_one_branch_whatever_order_conversations_mix_in(conversations, random):
    queues = []
    for number, turns_of_one in enumerate(conversations):
        sequence: tuple[int, ...] = (10 + number,)
        queue = []
        for context, completion in turns_of_one:
            prompt = sequence + context
            queue.append(Completion(message=REPLY, prompt_ids=prompt, completion_ids=completion, logprobs=()))
            sequence = prompt + completion
        queues.append(queue)
    calls = []
    while any(queues):
        queue = random.choice([queue for queue in queues if queue])
        calls.append(Call(len(calls), WORKFLOW, "policy", ChatRequest((USER,)), queue.pop(0)))
    found = [branch for branch, _ in find_branches(calls)]
    assert sorted(one.index for branch in found for one in branch) == list(range(len(calls)))
    for branch in found:
        for earlier, later in pairwise(branch):
            sequence = earlier.completion.prompt_ids + earlier.completion.completion_ids
            assert later.completion.prompt_ids[: len(sequence)] == sequence
