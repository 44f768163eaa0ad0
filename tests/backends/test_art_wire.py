"""Trajectories as OpenPipe ART's JSON."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
from pydantic import ValidationError

from etude.algorithms.samples import make_sample
from etude.core.errors import CapabilityError, TrainingError
from etude.core.sample import TrajectoryCollection
from etude.core.sample import to_trajectory as built
from etude.core.trajectory import EpisodeItem, Trajectory
from etude.integrations.art.client import FLAT, check_episode_order, to_art_groups, to_art_trajectory
from etude.integrations.art.config import ARTTrainerAdapterConfig
from tests.algorithms.scripted_episodes import call, conversation, episode
from tests.backends.art_stand_in import Trajectory as ArtTrajectory
from tests.backends.art_stand_in import check_messages


def in_order(*roles, reward=1.0):
    items = [
        EpisodeItem(
            role=role,
            content=role,
            logprobs=[-0.5] if role == "assistant" else None,
            token_ids=(7,) if role == "assistant" else None,
        )
        for role in roles
    ]
    return Trajectory(episode=items, reward=reward)


def sample(*turns, reward=1.0):
    record = episode(conversation(*turns))
    return built(make_sample(record.calls, record, reward, reasoning=None))


def collection(*groups):
    return TrajectoryCollection(trajectories=[list(group) for group in groups], run_id="job")


@pytest.mark.parametrize(
    ("roles", "problem"),
    [
        ((), "no messages"),
        (("assistant",), "first message .*role assistant"),
        (("tool", "assistant"), "first message .*role tool"),
        (("user",), "last message .*role user"),
        (("user", "assistant", "user"), "last message .*role user"),
        (("user", "user", "assistant"), "consecutive user messages"),
        (("user", "assistant", "assistant"), "consecutive assistant messages"),
        (("user", "environment", "assistant"), "role environment"),
        (("user", "tool", "assistant"), "tool message .*user message"),
        (("system", "system", "user", "assistant", "user", "assistant"), None),
        (("user", "assistant", "tool", "tool", "assistant"), None),
        (("system", "assistant"), None),
    ],
)
def test_an_order_that_art_cannot_train_on_is_refused(roles, problem):
    with nullcontext() if problem is None else pytest.raises(ValueError, match=problem):
        check_episode_order(in_order(*roles))


def test_an_answer_is_a_choice_with_the_sampled_tokens_and_their_logprobs():
    made = to_art_trajectory(sample("hi", "ok")).model_dump()
    question, answer = made["messages_and_choices"]
    assert question == {"role": "user", "content": "hi"}
    assert answer == {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": "ok", "refusal": None},
        "logprobs": {
            "content": [
                {
                    "token": f"token_id:{ord(one)}",
                    "bytes": None,
                    "logprob": -ord(one) / 1000,
                    "top_logprobs": [],
                }
                for one in "ok."
            ],
            "refusal": None,
        },
    }
    facts = {"id": "e", "generation": 0, "episode": "train/1/e/0", "branch": 0, "drifted": False}
    assert made["metadata"] == facts
    check_messages(ArtTrajectory.model_validate(made))


def test_tool_calls_and_results_stay_what_they_are_and_given_answers_are_not_trained_on():
    wire = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "an example"},
        {"role": "tool", "content": "seen", "tool_call_id": "call_0"},
    ]
    record = episode(
        [call(0, messages, {"role": "assistant", "content": None, "tool_calls": [wire]}, "<", "ok.")]
    )
    tools = ({"type": "function", "function": {"name": "look"}},)
    made = to_art_trajectory(built(replace(make_sample(record.calls, record, 1.0), tools=tools))).model_dump()
    *context, answer = made["messages_and_choices"]
    assert context == messages
    assert answer["message"]["tool_calls"] == [wire]
    assert made["tools"] == [{"type": "function", "function": {"name": "look"}}]
    check_messages(ArtTrajectory.model_validate(made))


def test_what_cannot_be_trained_on_is_left_out_and_counted():
    good = [sample("q", "yes"), sample("q", "no", reward=0.0)]
    flat = [sample("r", "no"), sample("r", "nope")]
    broken = [sample("s", "yes"), in_order("user", "assistant", "user")]
    given_to = to_art_groups(collection(good, flat, broken))
    assert [len(group["trajectories"]) for group in given_to.groups] == [2]
    (other,) = given_to.rejected.keys() - {FLAT}
    assert "role user" in other and given_to.rejected == {FLAT: 3, other: 1}


@pytest.mark.parametrize("groups", [[], [[]], [[sample("q", "yes")]], [[sample("q", "a"), sample("q", "b")]]])
def test_a_batch_with_nothing_to_train_on_is_an_error(groups):
    with pytest.raises(TrainingError, match=r"job job: .*no trajectory .*Nothing was submitted"):
        to_art_groups(collection(*groups))


def test_an_answer_without_tokens_is_left_out_with_the_reason():
    record = episode(
        [call(0, [{"role": "user", "content": "q"}], {"role": "assistant", "content": "a"}, None, None)]
    )
    with pytest.raises(TrainingError, match=r"1 × .*no token ids"):
        to_art_groups(collection([built(make_sample(record.calls, record, 1.0))]))


def test_step_rewards_have_no_place_in_art():
    with pytest.raises(CapabilityError, match="step rewards"):
        to_art_groups(collection([sample("q", "a").model_copy(update={"shaped_rewards": [1.0]})]))


@pytest.mark.parametrize(
    ("backend", "problem"),
    [
        ({}, "give either `base_url`"),
        ({"ip": "a", "base_url": "http://b"}, "give either `base_url`"),
        ({"base_url": "gpu:7999"}, "expected an address"),
        ({"base_url": "http://me:secret@gpu"}, "password .*`api_key`"),
        ({"ip": "a", "port": 70000}, r"port\n.* 65535"),
    ],
)
def test_the_address_is_checked(backend, problem):
    with pytest.raises(ValidationError, match=problem):
        ARTTrainerAdapterConfig(backend=backend)


def test_the_key_is_not_shown():
    config = ARTTrainerAdapterConfig(backend={"ip": "a", "api_key": "very-secret"})
    assert "very-secret" not in f"{config!r} {config.model_dump_json()}"
