"""Trajectories to token sequences: what was sampled is trained on, with its group's advantage."""

from __future__ import annotations

import pytest

from etude.core.errors import TrainingError
from etude.core.message import OpenAIMessage
from etude.core.trajectory import DPOItem, EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryCollection
from etude.learner.batch import TokenSequence
from etude.learner.collate import dpo_batch, grpo_batch, supervised_batch


def item(context, tokens, logprobs=None, **facts):
    return EpisodeItem(
        role=EpisodeItemRole.ASSISTANT,
        content="",
        context_ids=tuple(context),
        token_ids=tuple(tokens),
        logprobs=[-0.5] * len(tokens) if logprobs is None else logprobs,
        metadata=facts or None,
    )


USER = EpisodeItem(role=EpisodeItemRole.USER, content="a")
GIVEN = EpisodeItem(
    role=EpisodeItemRole.ASSISTANT, content="an example", logprobs=(), metadata={"given": True}
)


def trajectory(reward, *items, shaped=None, **facts):
    return Trajectory(episode=list(items), reward=reward, shaped_rewards=shaped, metadata=facts)


def collection(*groups, method="grpo"):
    return TrajectoryCollection(trajectories=list(groups), run_id="job", method=method)


def only(batch):
    return [unit[0] for unit in batch.units]


def test_a_sequence_is_context_and_sampled_tokens_in_turn():
    one = trajectory(1.0, USER, GIVEN, item([1, 2], [3], [-0.1]), USER, item([4], [5, 6], [-0.2, -0.3]))
    other = trajectory(0.0, item([1], [2]))
    found = only(grpo_batch(collection([one, other])))
    assert found[0] == TokenSequence(
        ids=(1, 2, 3, 4, 5, 6),
        weights=(0, 0, 1, 0, 1, 1),
        advantages=(0, 0, 1, 0, 1, 1),
        logprobs=(0, 0, -0.1, 0, -0.2, -0.3),
        temperatures=(1.0,) * 6,
    )
    assert found[1].advantages == (0, -1)


def test_groups_are_scored_on_their_own():
    easy = [trajectory(reward, item([1], [2])) for reward in (1.0, 1.0)]
    hard = [trajectory(reward, item([1], [2])) for reward in (0.0, 4.0)]
    lone = [trajectory(3.0, item([1], [2]))]
    advantages = [one.advantages[1] for one in only(grpo_batch(collection(easy, hard, lone), "none"))]
    assert advantages == [0.0, 0.0, -2.0, 2.0, 0.0]


def test_branches_of_one_episode_count_once_and_share_its_advantage():
    branches = [trajectory(1.0, item([1], [2]), episode="e") for _ in range(3)]
    other = trajectory(0.0, item([1], [2]), episode="f")
    advantages = [one.advantages[1] for one in only(grpo_batch(collection([*branches, other]), "none"))]
    assert advantages == [0.5, 0.5, 0.5, -0.5]


def test_shaped_rewards_give_every_turn_an_advantage_of_its_own():
    one = trajectory(9.0, item([1], [2]), item([3], [4]), shaped=[3.0, 1.0])
    other = trajectory(1.0, item([1], [2]), item([3], [4]), shaped=[1.0, 3.0])
    plain = trajectory(2.0, item([1], [2]))
    found = only(grpo_batch(collection([one, other, plain]), "none"))
    assert [sequence.advantages for sequence in found] == [(0, 1, 0, -1), (0, -1, 0, 1), (0, 0)]


def test_each_token_has_the_temperature_that_it_was_sampled_at():
    one = trajectory(1.0, item([1], [2], temperature=0.5), item([3], [4], temperature=0.0))
    (found,) = only(grpo_batch(collection([one])))
    assert found.temperatures == (0.5, 0.5, 1.0, 1.0)  # A greedy token's logprob is the model's own.


def test_supervised_training_counts_every_sampled_token_the_same():
    one = trajectory(0.0, GIVEN, item([1], [2, 3], logprobs=()))
    (found,) = only(supervised_batch(collection([one], method="supervised")))
    assert (found.weights, found.advantages, found.logprobs) == ((0, 1, 1), (0, 1, 1), (0, 0, 0))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="", logprobs=[-1.0]),
            "episode e has no token ids.*return_token_ids",
        ),
        (item([1], [2, 3], [-1.0]), "episode e has 1 logprobs for 2 sampled tokens"),
        (item([1], [2, 3], ()), "episode e has 0 logprobs for 2 sampled tokens"),
    ],
)
def test_an_episode_without_its_tokens_is_named(bad, message):
    with pytest.raises(TrainingError, match=message):
        grpo_batch(collection([trajectory(1.0, bad, episode="e")]))


def test_shaped_rewards_of_another_number_are_named():
    one = trajectory(1.0, item([1], [2]), shaped=[1.0, 2.0], episode="e")
    with pytest.raises(TrainingError, match="episode e has 2 shaped rewards for 1 sampled messages"):
        grpo_batch(collection([one]))


def preference(**fields):
    return DPOItem(prompt="a", chosen_response="b", rejected_response="c", **fields)


def by_characters(prompt, response):
    return tuple(map(ord, str(prompt))), tuple(map(ord, response))


def test_a_preference_is_a_pair_that_shares_its_prompt():
    pair = preference(
        prompt_ids=(1, 2),
        chosen_ids=(3, 4),
        rejected_ids=(5,),
        chosen_logprobs=(-0.1, 0.0),
        rejected_logprobs=(-0.3,),
        chosen_mask=(True, False),
    )
    one = trajectory(1.0, pair, temperature=0.5)
    ((chosen, rejected),) = dpo_batch(collection([one], method="dpo"), by_characters).units
    assert chosen == TokenSequence((1, 2, 3, 4), (0, 0, 1, 0), (0, 0, 1, 1), (0, 0, -0.1, 0), (0.5,) * 4)
    assert rejected == TokenSequence((1, 2, 5), (0, 0, 1), (0, 0, 1), (0, 0, -0.3), (0.5,) * 3)


def test_a_preference_that_is_only_text_is_tokenised():
    pair = DPOItem(
        prompt=[OpenAIMessage(role="user", content="a")], chosen_response="b", rejected_response="cd"
    )
    ((chosen, rejected),) = dpo_batch(
        collection([trajectory(1.0, pair)], method="dpo"),
        lambda prompt, response: ((7,), by_characters("", response)[1]),
    ).units
    assert (chosen.ids, rejected.ids) == ((7, 98), (7, 99, 100))
    assert rejected.weights == (0, 1, 1)


def test_a_preference_without_logprobs_cannot_have_the_sampler_for_reference():
    data = collection([trajectory(1.0, preference())], method="dpo")
    assert dpo_batch(data, by_characters).units
    with pytest.raises(TrainingError, match="reference: base"):
        dpo_batch(data, by_characters, needs_logprobs=True)


def test_other_data_than_preferences_is_refused():
    with pytest.raises(TrainingError, match="DPO trains on preferences"):
        dpo_batch(collection([trajectory(1.0, item([1], [2]))], method="dpo"), by_characters)
    uneven = preference(prompt_ids=(1,), chosen_ids=(2, 3), rejected_ids=(4,), chosen_mask=(True,))
    with pytest.raises(TrainingError, match="another length"):
        dpo_batch(collection([trajectory(1.0, uneven)], method="dpo"), by_characters)
