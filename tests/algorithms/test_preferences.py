from etude.algorithms.samples import branches_of, pair_of, same_prompt, sample_of
from etude.core.edge import trajectory_of
from etude.core.episode import WORKFLOW
from tests.algorithms.scripted_episodes import call, conversation, episode, ids

SHARED = [{"role": "user", "content": "q"}]


def branch(calls):
    (found,) = branches_of(episode(calls), (WORKFLOW,), "policy")
    return sample_of(found, episode(calls), 0.0)


def preference(chosen, rejected):
    pair = pair_of(chosen, rejected)
    return None if pair is None else trajectory_of(pair).episode[0]


def test_a_pair_parts_where_the_tokens_part():
    item = preference(branch(conversation("q", "abc")), branch(conversation("q", "abd")))
    assert item.prompt_ids == ids("<q>ab")
    assert (item.chosen_ids, item.rejected_ids) == (ids("c."), ids("d."))
    assert item.chosen_mask == (True, True)
    assert item.chosen_logprobs == tuple(-token / 1000 for token in ids("c."))
    assert [message.to_wire() for message in item.prompt] == SHARED
    assert (item.chosen_response, item.rejected_response) == ("abc", "abd")


def test_over_several_turns_the_whole_rest_is_the_response_and_observations_are_masked():
    item = preference(branch(conversation("q", "a", "x", "b")), branch(conversation("q", "a", "y", "c")))
    assert item.prompt_ids == ids("<q>a.<")
    assert item.chosen_ids == ids("x>b.")
    assert item.chosen_mask == (False, False, True, True)
    assert item.chosen_logprobs[:2] == (0.0, 0.0)
    assert item.chosen_response == "[USER]: x\n\n[ASSISTANT]: b"


def test_a_pair_where_nothing_was_sampled_after_the_parting_is_no_preference():
    assert preference(branch(conversation("q", "a")), branch(conversation("q", "a", "more", "b"))) is None


def test_without_token_ids_the_texts_are_the_preference():
    good = branch([call(0, SHARED, {"role": "assistant", "content": "a"}, None, None)])
    bad = branch([call(0, SHARED, {"role": "assistant", "content": "b"}, None, None)])
    item = preference(good, bad)
    assert (item.prompt_ids, item.chosen_ids, item.chosen_mask) == (None, None, None)
    assert (item.chosen_response, item.rejected_response) == ("a", "b")
    assert preference(good, good) is None


def test_prompts_are_the_same_by_tokens_where_they_are_known_and_by_messages_otherwise():
    assert same_prompt(branch(conversation("q", "a")), branch(conversation("q", "b")))
    assert not same_prompt(branch(conversation("q", "a")), branch(conversation("p", "a")))
    unknown = branch([call(0, SHARED, {"role": "assistant", "content": "a"}, None, None)])
    assert same_prompt(unknown, branch(conversation("q", "b")))
    assert not same_prompt(unknown, branch(conversation("p", "b")))
