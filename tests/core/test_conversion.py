"""Trajectories and rows to samples and back: what was sampled is trained on, nothing is lost."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from etude.algorithms.algorithm import read_group
from etude.core.call import Constraint, Sampling
from etude.core.conversion import Encoder, convert_unit, to_sample
from etude.core.errors import RequestError, TrainingError
from etude.core.message import OpenAIMessage
from etude.core.sample import Sample, TrajectoryCollection, Turn, to_trajectory
from etude.core.training_rows import ROWS, GrpoRow, GrpoTrajectory, GrpoTurn, guess_method
from etude.core.trajectory import DPOItem, EpisodeItem, EpisodeItemRole, Trajectory
from etude.wire.request_body import validate_body
from tests.support import draws


def item(context, tokens, logprobs=None, **fields):
    return EpisodeItem(
        role=EpisodeItemRole.ASSISTANT,
        content="",
        context_ids=tuple(context),
        token_ids=tuple(tokens),
        logprobs=[-0.5] * len(tokens) if logprobs is None else logprobs,
        **fields,
    )


USER = EpisodeItem(role=EpisodeItemRole.USER, content="a")
GIVEN = EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="an example", logprobs=(), given=True)


def trajectory(reward, *items, shaped=None, episode=None):
    return Trajectory(episode=list(items), reward=reward, shaped_rewards=shaped, episode_id=episode)


def test_a_sample_is_context_and_sampled_tokens_in_turn():
    one = trajectory(1.0, USER, GIVEN, item([1, 2], [3], [-0.1]), USER, item([4], [5, 6], [-0.2, -0.3]))
    assert to_sample(one) == Sample(
        ids=(1, 2, 3, 4, 5, 6),
        mask=(False, False, True, False, True, True),
        logprobs=(0, 0, -0.1, 0, -0.2, -0.3),
        turns=(Turn(2, 3), Turn(4, 6)),
        reward=1.0,
    )


def test_each_turn_says_how_it_was_sampled():
    ways = Sampling(temperature=0.5), Sampling(top_k=3, constraint=Constraint("regex", "a+"))
    one = trajectory(1.0, item([1], [2], sampling=ways[0]), item([3], [4], sampling=ways[1]))
    again = to_sample(Trajectory.model_validate_json(one.model_dump_json()))
    assert tuple(turn.sampling for turn in again.turns) == ways


def test_what_is_imitated_needs_no_logprobs():
    found = to_sample(trajectory(0.0, GIVEN, item([1], [2, 3], logprobs=())), needs_logprobs=False)
    assert (found.mask, found.logprobs) == ((False, True, True), (0, 0, 0))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="", logprobs=[-1.0]), "e .*return_token_ids"),
        (item([1], [2, 3], [-1.0]), "episode e .* 1 logprobs .* 2 "),
        (item([1], [2, 3], ()), "episode e .* 0 logprobs .* 2 "),
        (item([1], [2, 3], advantages=(0.5,)), "episode e .* 1 advantages .* 2 "),
    ],
)
def test_an_episode_without_its_tokens_is_named(bad, message):
    with pytest.raises(TrainingError, match=message):
        to_sample(trajectory(1.0, bad, episode="e"))
    with pytest.raises(TrainingError, match="example q7 has"):
        to_sample(trajectory(1.0, bad).model_copy(update={"example_id": "q7"}))


def test_shaped_rewards_of_another_number_are_named():
    with pytest.raises(TrainingError, match=r"episode e .* 2 shaped rewards .* 1 "):
        to_sample(trajectory(1.0, item([1], [2]), shaped=[1.0, 2.0], episode="e"))


def preference(**fields):
    return DPOItem(prompt="a", chosen_response="b", rejected_response="c", **fields)


def codes(text):
    return tuple(map(ord, str(text)))


BY_CHARACTERS = Encoder(codes, codes)


def make_pairs(*items, encoder=BY_CHARACTERS, needs_logprobs=False):
    return convert_unit(trajectory(1.0, *items), "pairs", encoder, needs_logprobs=needs_logprobs)


def test_a_preference_is_a_pair_that_shares_its_prompt():
    pair = preference(
        prompt_ids=(1, 2),
        chosen_ids=(3, 4),
        rejected_ids=(5,),
        chosen_logprobs=(-0.1, 0.0),
        rejected_logprobs=(-0.3,),
        chosen_mask=(True, False),
        sampling=Sampling(temperature=0.5),
    )
    (found,) = make_pairs(pair)
    chosen, rejected = found.samples
    assert (chosen.ids, chosen.mask, chosen.logprobs) == ((1, 2, 3, 4), (0, 0, 1, 0), (0, 0, -0.1, 0))
    assert (rejected.ids, rejected.mask, rejected.logprobs) == ((1, 2, 5), (0, 0, 1), (0, 0, -0.3))
    assert found.shared == 2
    assert chosen.turns == (Turn(2, 3, sampling=Sampling(temperature=0.5)),)


def test_a_preference_that_is_only_text_is_tokenised():
    pair = DPOItem(
        prompt=[OpenAIMessage(role="user", content="a")], chosen_response="b", rejected_response="cd"
    )
    (found,) = make_pairs(pair, encoder=Encoder(lambda prompt: (7,), codes))
    assert (found.chosen.ids, found.rejected.ids) == ((7, 98), (7, 99, 100))
    assert found.rejected.mask == (0, 1, 1)


def test_a_preference_without_logprobs_cannot_have_the_sampler_for_reference():
    assert make_pairs(preference())
    with pytest.raises(TrainingError, match="reference: base"):
        make_pairs(preference(), needs_logprobs=True)


def test_other_data_than_preferences_is_refused():
    with pytest.raises(TrainingError, match="DPO trains on preferences"):
        make_pairs(item([1], [2]))
    with pytest.raises(TrainingError, match=r"episodes, .*preference"):
        to_sample(trajectory(1.0, preference()))
    uneven = preference(prompt_ids=(1,), chosen_ids=(2, 3), rejected_ids=(4,), chosen_mask=(True,))
    with pytest.raises(TrainingError, match="another length"):
        make_pairs(uneven)


long = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=4)


def test_tokens_that_the_mask_leaves_out_of_an_answer_have_no_weight_elsewhere():
    one = Sample((1, 2, 3), (False, True, False), (0.0, -0.5, -0.5), turns=(Turn(1, 3),))
    assert to_sample(to_trajectory(one)).loss_weights == (0.0, 1.0, 0.0)
    with pytest.raises(TrainingError, match="mask"):
        to_trajectory(replace(one, turns=(Turn(2, 3),)))


@given(long, st.booleans())
def test_a_sample_survives_the_edge(lengths, scored):
    ids, mask, turns, messages = [], [], [], []
    for number, (context, sampled) in enumerate(lengths):
        messages += [{"role": role, "content": f"{number}"} for role in ("user", "assistant")]
        start = len(ids) + context
        ids += [*range(start + sampled - len(ids))]
        mask += [False] * context + [True] * sampled
        turns.append(Turn(start, len(ids), value=float(number) if scored else None, model_version=number))
    one = Sample(
        tuple(ids),
        tuple(mask),
        tuple(-0.5 * trained for trained in mask),
        turns=tuple(replace(turn, message=2 * n + 1) for n, turn in enumerate(turns)),
        reward=0.5,
        example="x",
        episode="e",
        agent="solver",
        messages=tuple(messages),
    )
    assert to_sample(to_trajectory(one)) == replace(one, turns=tuple(turns), messages=())


def test_a_collection_has_samples_until_its_trajectories_are_asked_for():
    one = Sample((1, 2), (False, True), (0.0, -0.5), turns=(Turn(1, 2),), reward=1.0, group_rewards=[1.0])
    made = TrajectoryCollection(trajectories=[[one]], run_id="r")
    assert made.groups == [[one]] and read_group([one], "samples") == [one]
    written = made.model_copy().model_dump(mode="json")["trajectories"]
    assert written == [[to_trajectory(one).model_dump(mode="json")]]
    made.trajectories[0][0].reward = 0.5
    assert [to_sample(each).reward for each in made.groups[0]] == [0.5]


ids = st.lists(st.integers(0, 10**6), min_size=1, max_size=4)
numbers = st.floats(-10, 10)


@st.composite
def turns(draw: st.DrawFn) -> GrpoTurn:
    sampled = tuple(draw(ids))
    return GrpoTurn(
        context_ids=tuple(draw(ids)),
        token_ids=sampled,
        logprobs=tuple(draw(st.floats(-10, 0)) for _ in sampled),
        finish_reason=draw(st.sampled_from([None, "length"])),
    )


@st.composite
def trajectories(draw: st.DrawFn) -> GrpoTrajectory:
    said = tuple(draw(st.lists(turns(), min_size=1, max_size=3)))
    shaped = tuple(draw(numbers) for _ in said) if draw(st.booleans()) else None
    return GrpoTrajectory(turns=said, reward=draw(numbers), shaped_rewards=shaped, episode=draw(st.text()))


@settings(max_examples=draws(10))
@given(st.lists(trajectories(), min_size=1, max_size=3))
def test_a_group_survives_the_file(rows: list[GrpoTrajectory]) -> None:
    row = GrpoRow(trajectories=tuple(rows))
    line = GrpoRow.from_group(row.group()).model_dump_json(exclude_none=True)
    assert GrpoRow.model_validate_json(line) == row


def test_a_sample_is_the_same_from_the_file_as_from_the_trajectory() -> None:
    said = item(
        (7, 8),
        (3, 2),
        (-0.5, -0.25),
        advantages=(0.5, 1.5),
        weights=(1.0, 0.0),
        teacher_logprobs=(-0.1, -0.2),
        sampling=Sampling(temperature=0.7, constraint=Constraint("regex", "a+"), logit_bias=((3, 0.5),)),
    )
    sample = to_sample(trajectory(1.0, USER, GIVEN, said, episode="a"))
    line = GrpoRow.from_group([sample]).model_dump_json(exclude_none=True)
    assert GrpoRow.model_validate_json(line).group() == [sample]


ASKED = {"role": "user", "content": "?"}
SAID = {"role": "assistant", "content": "!"}


def group_row(**changes):
    return {"trajectories": [{"turns": [{"token_ids": [1], "logprobs": [-1.0], **changes}], "reward": 1}]}


@pytest.mark.parametrize(
    ("row", "method"),
    [
        ({"messages": [ASKED, SAID]}, "supervised"),
        ({"input": {"messages": [ASKED]}, "preferred_output": [SAID], "non_preferred_output": [SAID]}, "dpo"),
        (group_row(), "grpo"),
    ],
)
def test_a_line_tells_its_method(row: dict, method: str) -> None:
    assert guess_method(row) == method
    ROWS[method].model_validate(json.loads(json.dumps(row)))


@pytest.mark.parametrize(
    ("method", "row", "told"),
    [
        ("supervised", {"messages": [ASKED]}, "assistant message to learn"),
        ("supervised", {"messages": [ASKED, SAID], "typo": 1}, "typo"),
        ("supervised", {"messages": [ASKED | {"weight": 1}, SAID]}, "only assistant messages"),
        ("supervised", {"messages": [{"role": "assistant"}]}, "needs content"),
        ("supervised", {"messages": [{"role": "tool", "content": "4"}, SAID]}, "tool_call_id"),
        ("dpo", {"input": {"messages": [ASKED]}, "preferred_output": [SAID]}, "non_preferred_output"),
        (
            "dpo",
            {"input": {"messages": [ASKED]}, "preferred_output": [ASKED], "non_preferred_output": [SAID]},
            "must be assistant messages",
        ),
        ("grpo", group_row(token_ids=[1, 2]), "1 logprobs"),
        ("grpo", group_row(token_ids=[-1]), "ids"),
        ("grpo", group_row(logprobs=["NaN"]), "finite"),
    ],
)
def test_a_wrong_line_is_refused_with_its_field(method: str, row: dict, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        ROWS[method].model_validate(row)


def test_of_a_wrong_line_only_what_is_wrong_is_told() -> None:
    with pytest.raises(RequestError) as raised:
        validate_body(ROWS["grpo"], group_row(token_ids=[1, 2]))
    assert str(raised.value) == "trajectories[0].turns[0]: 1 logprobs for 2 token_ids"


def test_a_collection_is_no_flat_list() -> None:
    flat = Trajectory(episode=[], reward=1.0)
    with pytest.raises(ValidationError, match=r"^1 validation error(.|\n)* list of groups"):
        TrajectoryCollection(trajectories=[flat, flat], run_id="r")


def test_a_line_of_no_method_is_known_as_such() -> None:
    assert guess_method({"prompt": "?"}) is None
    assert guess_method([1]) is None
