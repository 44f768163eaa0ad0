"""ART's trajectories as token ids: what was sampled is never tokenised again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from etude.core.call import ChatRequest
from etude.core.errors import RequestError
from etude.core.training_rows import GrpoRow
from etude.integrations.art import serving
from etude.integrations.art.serving_models import to_training_rows
from etude.integrations.art.wire import ArtGroup
from etude.models.text_codec import TextCodec
from etude.models.tiny import TinyShape, build_policy, build_tokenizer
from etude.wire.http_server import ApiError
from tests.server.art_client import ASK, choice, group, trajectory

SHAPE = TinyShape(hidden_size=8, heads=1, intermediate_size=8, layers=1)
SPEECH: TextCodec = build_policy(build_tokenizer(["yes, no"], vocab_size=300), 0, SHAPE).speech
AGAIN = {"role": "user", "content": "sure?"}


def ids(text: str) -> tuple[int, ...]:
    return tuple(SPEECH.tokenizer(text)["input_ids"])


def prompt(*messages: dict[str, Any]) -> tuple[int, ...]:
    return SPEECH.template.prompt(ChatRequest(messages)).ids


def said(text: str, *, end: str = "<|end|>", **more: Any) -> dict[str, Any]:
    """A choice that was sampled with the tokens that its text usually has."""
    return choice(*((f"token_id:{token}", -0.5) for token in ids(text + end)), content=text, **more)


def counted(*found: dict[str, Any]) -> tuple[list[GrpoRow], dict[str, int]]:
    return to_training_rows([ArtGroup.model_validate(one) for one in found], SPEECH)


def rows(*found: dict[str, Any]) -> list[GrpoRow]:
    return counted(*found)[0]


def test_turns_that_extend_each_other_are_one_sequence() -> None:
    first, second = said("yes"), said("no")
    talk = trajectory(1.0, first, AGAIN, second)
    made, counts = counted(group(talk, trajectory(0.0, said("no"))))
    long, short = made[0].trajectories
    assert [turn.token_ids for turn in long.turns] == [ids("yes<|end|>"), ids("no<|end|>")]
    assert [turn.logprobs[0] for turn in long.turns] == [-0.5, -0.5]
    seen = tuple(token for turn in long.turns for token in (*turn.context_ids, *turn.token_ids))
    assert seen == (*prompt(*ASK, {"role": "assistant", "content": "yes"}, AGAIN), *ids("no<|end|>"))
    assert (long.reward, short.reward) == (1.0, 0.0)
    assert counts["drifted_prompts"] == 0


@given(st.text(st.characters(codec="ascii", exclude_characters="<|>"), max_size=6))
def test_what_the_model_saw_stands_before_each_choice(text: str) -> None:
    (row,) = rows(group(trajectory(1.0, said(text)), trajectory(0.0, said("no"))))
    (turn,) = row.trajectories[0].turns
    assert (turn.context_ids, turn.token_ids) == (prompt(*ASK), ids(text + "<|end|>"))


def test_a_prompt_that_does_not_extend_the_tokens_before_is_a_branch() -> None:
    odd = choice(*((f"token_id:{token}", -0.5) for token in ids("y") + ids("e") + ids("s") + ids("<|end|>")))
    made, counts = counted(group(trajectory(1.0, odd, AGAIN, said("no")), trajectory(0.0, said("no"))))
    first, second, other = made[0].trajectories
    assert first.turns[0].token_ids == ids("y") + ids("e") + ids("s") + ids("<|end|>")
    assert second.turns[0].context_ids == prompt(*ASK, {"role": "assistant", "content": "yes"}, AGAIN)
    assert (first.episode, second.episode, other.episode) == ("0", "0", "1")
    assert counts["drifted_prompts"] == 1


def test_an_answer_that_was_cut_is_closed_by_its_next_prompt() -> None:
    cut = said("yes", end="", finish_reason="length")
    (long, _) = rows(group(trajectory(1.0, cut, AGAIN, said("no")), trajectory(0.0, cut)))[0].trajectories
    assert long.turns[1].context_ids[0] == ids("<|end|>")[0]


def test_further_histories_are_branches_of_the_same_episode() -> None:
    more = {"messages_and_choices": [AGAIN, said("yes")], "tools": None}
    talk = trajectory(1.0, said("no"), additional_histories=[more])
    made = rows(group(talk, trajectory(0.0, said("no"))))[0].trajectories
    assert [one.episode for one in made] == ["0", "0", "1"]
    assert made[1].turns[0].context_ids == prompt(AGAIN)


def test_only_what_has_logprobs_is_trained_and_the_rest_is_context() -> None:
    given = {"role": "assistant", "content": "maybe"}
    unknown = choice(content="maybe")
    for earlier in (given, unknown):
        made = rows(group(trajectory(1.0, earlier, AGAIN, said("yes")), trajectory(0.0, said("no"))))
        (turn,) = made[0].trajectories[0].turns
        assert turn.context_ids == prompt(*ASK, given, AGAIN)
    three = trajectory(1.0, unknown), trajectory(0.0, said("no")), trajectory(0.5, said("no"))
    made, counts = counted(group(*three))
    assert len(made[0].trajectories) == 2
    assert counts["trajectories_without_logprobs"] == 1


odd = st.recursive(st.none() | st.integers() | st.text(max_size=4), lambda one: st.lists(one, max_size=2))
odd_message = st.dictionaries(
    st.sampled_from(["role", "content", "tool_calls", "finish_reason", "message", "logprobs"]),
    odd,
    max_size=4,
)


@given(st.lists(odd_message | st.sampled_from([said("yes"), AGAIN]), max_size=4), odd)
def test_whatever_a_trajectory_holds_it_is_rows_or_refused(messages: list[Any], tools: Any) -> None:
    strange = trajectory(1.0, *messages) | ({"tools": tools} if isinstance(tools, list) else {})
    try:
        found = ArtGroup.model_validate(group(strange, trajectory(0.0, said("no"))))
    except ValidationError:
        return
    try:
        made, _ = to_training_rows([found], SPEECH)
    except ApiError as error:
        assert str(error.param).startswith("trajectory_groups[0].trajectories[")
        return
    assert all(one.turns for row in made for one in row.trajectories)


def test_groups_that_teach_nothing_are_left_out() -> None:
    flat = group(trajectory(1.0, said("yes")), trajectory(1.0, said("no")))
    failed = {"trajectories": [], "exceptions": [{"type": "X", "message": "", "traceback": ""}]}
    made = rows(flat, failed, group(trajectory(1.0, said("yes")), trajectory(0.0, said("no"))))
    assert len(made) == 1


def test_tool_calls_are_rendered_as_they_were_said() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    asked = said(text, message=message, finish_reason="tool_calls")
    result = {"role": "tool", "tool_call_id": "c", "content": "2"}
    made, counts = counted(group(trajectory(1.0, asked, result, said("yes")), trajectory(0.0, said("no"))))
    assert [len(one.turns) for one in made[0].trajectories] == [2, 1]
    assert counts["drifted_prompts"] == 0


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b'{"trajectory_groups": ' + b"[" * 100 + b"]" * 100 + b"}", "it is nested deeper than 64 levels"),
        (b"[" + b"1," * 300 + b"1]", "it has more than 200 values"),
        (b'{"model": NaN}', "the request is not JSON"),
        (b"{", "the request is not JSON"),
        (b"[]", "the request must be a JSON object"),
    ],
)
def test_bodies_of_any_size_are_read_within_the_limits_of_all_json(
    body: bytes, problem: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(serving, "_MOST_VALUES", 200)
    with pytest.raises(RequestError) as refused:
        serving.TrainBody.parsed(body)
    assert problem in str(refused.value)
