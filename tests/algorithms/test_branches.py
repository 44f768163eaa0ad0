from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from etude.algorithms.samples import branches_of, sample_of
from etude.core.call import Call, ChatRequest, Completion
from etude.core.edge import trajectory_of
from etude.core.episode import WORKFLOW
from etude.core.message import message_key
from tests.algorithms.scripted_episodes import call, conversation, episode, ids
from tests.support import tool_call

USER = {"role": "user", "content": "hi"}
REPLY = {"role": "assistant", "content": "yes"}


def branches(calls, functions=(WORKFLOW,), model="policy"):
    return branches_of(episode(calls), functions, model)


def shape(found):
    """Call indices by branch."""
    return [[one.index for one in branch.calls] for branch in found]


def test_a_prompt_that_repeats_the_conversation_in_other_tokens_starts_a_branch_and_counts_as_drift():
    first, second = conversation("a", "b", "c", "d")
    again = replace(second, completion=replace(second.completion, prompt_ids=ids("<a>B.<c>")))
    found = branches([first, again])
    assert shape(found) == [[0], [1]]
    assert [branch.drifted for branch in found] == [False, True]


def test_what_was_written_differently_is_the_engines_word_too():
    one = call(0, [USER], REPLY, "<hi>", "yes.", drifted=True)
    told = replace(one, completion=replace(one.completion, fault="role tool: rewritten"))
    found = branches([told, *conversation("x", "y", start=1)])
    assert [branch.fault for branch in found] == ["role tool: rewritten", ""]


def test_a_branch_that_a_family_begins_on_purpose_is_no_drift():
    first, second = conversation("a", "b", "c", "d")
    anew = replace(second.completion, prompt_ids=ids("<a>B.<c>"), fault="its thinking is left out")
    found = branches([first, replace(second, completion=anew)])
    assert shape(found) == [[0], [1]]
    assert [(branch.drifted, branch.fault) for branch in found] == [(False, ""), (False, "")]


def test_two_answers_to_one_prompt_are_two_branches_and_the_shared_call_is_trained_once():
    first, second, third = conversation("a", "b", "c", "d", "e", "f")
    fork = replace(second, index=2, completion=replace(second.completion, completion_ids=ids("other.")))
    assert shape(branches([first, second, fork, replace(third, index=3)])) == [[0, 1, 3], [2]]


def test_only_the_target_functions_calls_to_the_target_model_are_taken():
    calls = [
        *conversation("a", "b"),
        *conversation("c", "d", start=1, function="judge"),
        *conversation("e", "f", start=2, model="other"),
    ]
    assert shape(branches(calls)) == [[0]]
    assert shape(branches(calls, functions=("judge",))) == [[1]]
    assert shape(branches(calls, model=None)) == [[0], [2]]


def test_without_token_ids_the_messages_decide():
    assert shape(
        branches([call(0, [USER], REPLY, None, None), call(1, [USER, REPLY, USER], REPLY, None, None)])
    ) == [[0, 1]]
    assert shape(
        branches([call(0, [USER], REPLY, None, None), call(1, [USER, USER], REPLY, None, None)])
    ) == [[0], [1]]


def test_spaces_in_the_arguments_of_calls_do_not_make_a_branch() -> None:
    said, sent = (tool_call("add", arguments) for arguments in ('{"a": 1,  "b": "x y"}', '{"a":1,"b":"x y"}'))
    assert message_key(said) == message_key(sent)
    assert message_key(said) != message_key(tool_call("add", '{"a":1,"b":"xy"}'))
    assert message_key(tool_call("add", "{a")) != message_key(tool_call("add", "{ a"))


tokens = st.lists(st.integers(0, 3), max_size=4).map(tuple)
turns = st.lists(st.tuples(tokens, tokens), min_size=1, max_size=6)


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
    found = branches(calls)
    assert sorted(one.index for branch in found for one in branch.calls) == list(range(len(calls)))
    for branch in found:
        for earlier, later in zip(branch.calls, branch.calls[1:], strict=False):
            sequence = earlier.completion.prompt_ids + earlier.completion.completion_ids
            assert later.completion.prompt_ids[: len(sequence)] == sequence


def test_messages_repeated_word_for_word_are_not_taken_for_the_same():
    record = episode(list(conversation("try again", "no", "try again", "no")))
    (branch,) = branches_of(record, ["*"], None)
    items = trajectory_of(sample_of(branch, record, 1.0)).episode
    assert [item.content for item in items] == ["try again", "no", "try again", "no"]
