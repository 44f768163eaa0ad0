"""Plays of protocols: which answers belong to whom, and what each earned."""

import pytest

from etude.algorithms import dpo, grpo
from etude.algorithms.dpo import Dpo
from etude.algorithms.episodes import (
    Collected,
    ScoredEpisode,
    Tally,
    answer_groups,
    by_agent,
    tree_of,
    turn_returns,
    without_retries,
)
from etude.algorithms.grpo import Grpo
from etude.algorithms.samples import branches_of
from etude.core.episode import Event
from etude.core.errors import RequestError
from etude.protocols import adp, debate, nip
from tests.algorithms.plays import EVERY, part_of, played, scored
from tests.algorithms.scripted_episodes import call, conversation, episode
from tests.support import ScriptedEngine

ACCEPT, REJECT = "Decision: accept", "Decision: reject"


def made(algorithm, episodes, tally=None):
    return algorithm.groups(episodes, Collected(0, 0, tally or Tally()))


def argument(request):
    """Provers argue, the verifier accepts."""
    return ACCEPT if "verifier" in request.messages[0]["content"] else "because"


async def test_each_agent_has_its_own_part_and_its_own_reward(tmp_path):
    record = await played(
        tmp_path, debate(max_message_rounds=2, verifier_first=False), ScriptedEngine(argument)
    )
    parts = {part[0].agent: part[0] for part in by_agent([scored(record, 0.3)])}
    assert {agent: part.reward for agent, part in parts.items()} == {
        "prover0": 0.0,
        "prover1": 1.0,
        "verifier": 1.0,
    }


async def test_only_agents_of_the_model_and_functions_count(tmp_path):
    engines = {"p": ScriptedEngine(["proof"]), "v": ScriptedEngine([ACCEPT])}
    policies = {"prover": "p", "verifier": "v"}
    record = await played_by(tmp_path, engines, policies)

    def agents(functions, model):
        branches = tuple(branches_of(record, functions, model))
        return [group[0].agent for group in by_agent([ScoredEpisode(record, 0.0, branches)])]

    assert agents(EVERY, "v") == ["verifier"]
    assert agents(["prover"], "v") == []


async def played_by(folder, engines, policies):
    from etude.store.journal import Journal
    from tests.protocols.games import play_record

    with Journal(folder / "play.db") as journal:
        return await play_record(adp(), engines, journal, policies=policies)


async def test_an_answer_that_was_asked_for_again_is_not_trained_on(tmp_path):
    record = await played(tmp_path, adp(), ["proof", "well", ACCEPT], retries=1)
    assert len(record.calls) == 3
    assert [call.index for call in without_retries(record).calls] == [0, 2]
    assert [branch.calls[0].index for branch in part_of("verifier", record)[0].branches] == [2]


def test_other_episodes_stay_as_they_are():
    record = episode(conversation("a", "b"))
    assert without_retries(record) is record
    with pytest.raises(RequestError, match=r"episode 'train/1/e/0': .*what each agent earned, and none did"):
        by_agent([scored(record)])


async def test_an_answer_earns_what_came_after_it(tmp_path):
    protocol = nip(max_message_rounds=5, verifier_no_guess_reward=-0.1)
    record = await played(tmp_path, protocol, ["one?", "so", "two?", "so", ACCEPT])
    tree = tree_of(record)
    (verifier,), (prover,) = (part_of(agent, record) for agent in ("verifier", "prover"))
    assert turn_returns(verifier.branches[0], tree, "verifier", 1.0) == pytest.approx([0.8, 0.9, 1.0])
    assert turn_returns(verifier.branches[0], tree, "verifier", 0.5) == pytest.approx([0.1, 0.4, 1.0])
    assert turn_returns(prover.branches[0], tree, "prover", 1.0) == pytest.approx([1.0, 1.0])
    values = tree.values("verifier")
    own = [values[node.id] for node in tree.nodes if node.agent == "verifier"]
    assert turn_returns(verifier.branches[0], tree, "verifier", 1.0) == pytest.approx(own)


async def test_grpo_compares_an_agent_with_itself_in_the_other_plays(tmp_path):
    records = [
        await played(tmp_path, adp(), ["proof", decision], generation=n, id=f"train/1/e/{n}")
        for n, decision in enumerate((ACCEPT, REJECT))
    ]
    groups = made(Grpo(credit="agent"), [[scored(record, 0.5) for record in records]])
    assert [[(one.reward, one.generation) for one in group.units] for group in groups] == [
        [(1.0, 0), (0.0, 1)],
        [(1.0, 0), (-1.0, 1)],
    ]
    assert [group.rewards for group in groups] == [[1.0, 0.0], [1.0, -1.0]]
    # With the episode's reward there is nothing to compare.
    tally = Tally()
    (none,) = made(Grpo(), [[scored(record, 0.5) for record in records]], tally)
    assert none.units == []
    assert tally.left_out == {grpo.NO_ADVANTAGE: 1}


async def test_turn_credit_gives_every_answer_its_own_advantage(tmp_path):
    protocol = nip(max_message_rounds=5, verifier_no_guess_reward=-0.1)
    early = await played(tmp_path, protocol, ["one?", "so", ACCEPT])
    late = await played(
        tmp_path, protocol, ["one?", "so", "two?", "so", REJECT], generation=1, id="train/1/e/1"
    )
    (group,) = answer_groups(part_of("verifier", early, late), 1.0)
    assert group[0].returns == pytest.approx([0.9, 1.0])
    assert group[1].returns == pytest.approx([-1.2, -1.1, -1.0])
    ((first,), (second,)) = _units(group)
    assert sorted(set(first.advantages)) == pytest.approx([0.0, 1.05])
    assert sorted(set(second.advantages)) == pytest.approx([-1.05, 0.0])


async def test_where_a_play_branches_the_answers_to_one_prompt_are_compared(tmp_path):
    answers = ["good", "bad", ACCEPT, REJECT, REJECT, REJECT]
    record = await played(tmp_path, adp(), answers, widths=2)
    tally = Tally()
    all_groups = made(Grpo(credit="turn"), [[scored(record, 0.5)]], tally)
    group, accepted = (kept.units for kept in all_groups if kept.units)
    assert [(one.reward, one.messages[-1]["content"]) for one in group] == [(0.5, "good"), (0.0, "bad")]
    assert [one.reward for one in accepted] == [1.0, -1.0]
    assert tally.left_out == {grpo.NO_ADVANTAGE: 1}
    advantages = [set(unit[0].advantages) - {0.0} for unit in _units(group)]
    assert advantages == [{0.25}, {-0.25}]


def _units(group):
    return Grpo(advantage_scale="none").units([group])[0]


def preferences(part, tally=None, **config):
    pairs = Dpo(compare="turns", **config).samples(part, tally or Tally())
    return [tuple(one.messages[-1]["content"] for one in pair.samples) for pair in pairs]


async def test_dpo_pairs_the_answers_to_one_prompt(tmp_path):
    answers = ["a", "b", "c", *[ACCEPT] * 3, ACCEPT, REJECT, REJECT, *[REJECT] * 3]
    record = await played(tmp_path, adp(), answers, widths=3)
    prover, tally = part_of("prover", record), Tally()
    assert preferences(prover, tally) == [("a", "c"), ("a", "b"), ("b", "c")]
    assert preferences(prover, pairs="best_vs_worst") == [("a", "c")]
    assert preferences(prover, min_reward_diff=0.5) == [("a", "c"), ("a", "b")]
    assert preferences(prover, tally, max_pairs_per_group=1) == [("a", "c")]
    assert tally.left_out == {dpo.OVER_LIMIT: 2}


def candidates(*values_and_replies, question="q"):
    """Calls with one prompt, each followed by a step reward; None for no reward."""
    asked = [{"role": "user", "content": question}]
    calls, events = [], []
    for index, (value, reply) in enumerate(values_and_replies):
        message = {"role": "assistant", "content": reply}
        calls.append(call(index, asked, message, f"<{question}>", f"{reply}."))
        if value is not None:
            events.append(Event("step_reward", after_call=index, value=value))
    return scored(episode(calls, events=events))


def test_dpo_pairs_scored_candidates_of_any_agent():
    tally = Tally()
    one = candidates((0.2, "a"), (0.9, "b"), (None, "c"), (0.2, "d"), (0.9, "b"))
    assert preferences([one], tally) == [("b", "a"), ("b", "d"), ("b", "a"), ("b", "d")]
    assert tally.left_out == {dpo.TIE: 2}
    assert preferences([candidates((0.5, "a"))]) == []


def test_equal_candidates_with_different_scores_are_no_pair():
    tally = Tally()
    assert preferences([candidates((0.0, "a"), (1.0, "a"))], tally) == []
    assert tally.left_out == {dpo.SAME_RESPONSE: 1}


def test_candidates_for_different_prompts_are_not_compared():
    first = candidates((1.0, "a"), question="one").episode.calls
    asked, reply = {"role": "user", "content": "two"}, {"role": "assistant", "content": "b"}
    second = [call(1, [asked], reply, "<two>", "b.")]
    events = [Event("step_reward", after_call=index, value=float(index)) for index in range(2)]
    record = episode([*first, *second], events=events)
    branches = tuple(branches_of(record, EVERY, "policy"))
    assert preferences([ScoredEpisode(record, 0.0, branches)]) == []


async def test_the_dpo_builder_splits_plays_by_agent_when_it_compares_turns(tmp_path):
    record = await played(tmp_path, adp(), ["a", "b", ACCEPT, REJECT], widths={"prover": 2})
    groups = made(Dpo(compare="turns"), [[scored(record)]])
    assert [len(group.units) for group in groups] == [1, 0]
    assert groups[0].units[0].chosen.agent == "prover"


def test_turn_credit_needs_no_second_episode_because_plays_branch():
    Grpo(num_generations=1, credit="turn").check()
    with pytest.raises(RequestError, match="no advantage"):
        Grpo(num_generations=1).check()
