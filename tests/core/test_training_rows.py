from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from etude.core.call import Constraint, Sampling
from etude.core.edge import sample_of
from etude.core.training_rows import ROWS, GrpoRow, GrpoTrajectory, GrpoTurn, method_of
from etude.core.trajectory import EpisodeItem, EpisodeItemRole, Trajectory

ids = st.lists(st.integers(0, 10**6), min_size=1, max_size=4)
numbers = st.floats(-10, 10)


@st.composite
def turns(draw: st.DrawFn) -> GrpoTurn:
    sampled = draw(ids)
    logprobs = [draw(st.floats(-10, 0)) for _ in sampled]
    cut_off = draw(st.sampled_from([None, "length"]))
    return GrpoTurn(
        context_ids=tuple(draw(ids)),
        token_ids=tuple(sampled),
        logprobs=tuple(logprobs),
        finish_reason=cut_off,
    )


@st.composite
def trajectories(draw: st.DrawFn) -> GrpoTrajectory:
    said = tuple(draw(st.lists(turns(), min_size=1, max_size=3)))
    shaped = tuple(draw(numbers) for _ in said) if draw(st.booleans()) else None
    return GrpoTrajectory(turns=said, reward=draw(numbers), shaped_rewards=shaped, episode=draw(st.text()))


@given(st.lists(trajectories(), min_size=1, max_size=3))
def test_a_group_survives_the_file(rows: list[GrpoTrajectory]) -> None:
    row = GrpoRow(trajectories=tuple(rows))
    line = GrpoRow.of_group(row.group()).model_dump_json(exclude_none=True)
    assert GrpoRow.model_validate_json(line) == row


def test_a_sample_is_the_same_from_the_file_as_from_the_trajectory() -> None:
    asked = EpisodeItem(role=EpisodeItemRole.USER, content="?")
    given = EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="as an example", logprobs=[], given=True)
    said = EpisodeItem(
        role=EpisodeItemRole.ASSISTANT,
        content="!",
        logprobs=[-0.5, -0.25],
        token_ids=(3, 2),
        context_ids=(7, 8),
        advantages=(0.5, 1.5),
        weights=(1.0, 0.0),
        teacher_logprobs=(-0.1, -0.2),
        sampling=Sampling(temperature=0.7, constraint=Constraint("regex", "a+"), logit_bias=((3, 0.5),)),
    )
    sample = sample_of(Trajectory(episode=[asked, given, said], reward=1.0, episode_id="a"))
    line = GrpoRow.of_group([sample]).model_dump_json(exclude_none=True)
    assert GrpoRow.model_validate_json(line).group() == [sample]


ASKED = {"role": "user", "content": "?"}
SAID = {"role": "assistant", "content": "!"}


@pytest.mark.parametrize(
    ("row", "method"),
    [
        ({"messages": [ASKED, SAID]}, "supervised"),
        (
            {"input": {"messages": [ASKED]}, "preferred_output": [SAID], "non_preferred_output": [SAID]},
            "dpo",
        ),
        (
            {"trajectories": [{"turns": [{"token_ids": [1], "logprobs": [-1.0]}], "reward": 1}]},
            "grpo",
        ),
    ],
)
def test_a_line_tells_its_method(row: dict, method: str) -> None:
    assert method_of(row) == method
    ROWS[method].model_validate(json.loads(json.dumps(row)))


@pytest.mark.parametrize(
    ("method", "row", "told"),
    [
        ("supervised", {"messages": []}, "messages"),
        ("supervised", {"messages": [ASKED]}, "no message of the role assistant to learn"),
        ("supervised", {"messages": [ASKED, SAID | {"weight": 0}]}, "to learn"),
        ("supervised", {"messages": [ASKED, SAID], "typo": 1}, "typo"),
        ("supervised", {"messages": [ASKED | {"weight": 1}, SAID]}, "only messages of the role assistant"),
        ("supervised", {"messages": [{"role": "assistant"}]}, "needs a content"),
        ("supervised", {"messages": [ASKED | {"reasoning_content": "hm"}, SAID]}, "reasoning_content"),
        ("supervised", {"messages": [{"role": "tool", "content": "4"}, SAID]}, "tool_call_id"),
        ("dpo", {"input": {"messages": [ASKED]}, "preferred_output": [SAID]}, "non_preferred_output"),
        (
            "dpo",
            {"input": {"messages": [ASKED]}, "preferred_output": [ASKED], "non_preferred_output": [SAID]},
            "role assistant",
        ),
        (
            "grpo",
            {"trajectories": [{"turns": [{"token_ids": [1, 2], "logprobs": [0]}], "reward": 1}]},
            "1 logprobs",
        ),
        ("grpo", {"trajectories": [{"turns": [{"token_ids": [-1], "logprobs": [0]}], "reward": 1}]}, "ids"),
        (
            "grpo",
            {"trajectories": [{"turns": [{"token_ids": [1], "logprobs": ["NaN"]}], "reward": 1}]},
            "finite",
        ),
    ],
)
def test_a_wrong_line_is_refused_with_its_field(method: str, row: dict, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        ROWS[method].model_validate(row)


def test_a_line_of_no_method_is_known_as_such() -> None:
    assert method_of({"prompt": "?"}) is None
    assert method_of([1]) is None
