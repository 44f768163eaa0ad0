"""A branch as a trajectory: its messages as episode items, with the sampled tokens where they belong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from etude.algorithms.branches import Branch, sequence_of
from etude.core.call import Call
from etude.core.episode import EpisodeRecord, Event
from etude.core.errors import TrainingError
from etude.core.message import Message, text_of
from etude.core.trajectory import EpisodeItem, EpisodeItemRole, Trajectory
from etude.rewards.shaping import discounted_returns

_KEPT = ("tool_calls", "tool_call_id", "name", "function_call", "refusal")
_ROLES = {role.value: role for role in EpisodeItemRole} | {"developer": EpisodeItemRole.SYSTEM}


def trajectory_of(
    branch: Branch, episode: EpisodeRecord, reward: float, discount: float, metadata: dict[str, Any]
) -> Trajectory:
    """One branch as a trajectory. `metadata` is added to the facts of the episode."""
    last = branch.calls[-1].request
    facts = {
        "id": episode.example.id,
        "generation": episode.generation,
        "episode": episode.id,
        "branch": branch.index,
        "drifted": branch.drifted,
        **({"tools": list(last.tools)} if last.tools else {}),
    }
    return Trajectory(
        episode=items_of(branch),
        reward=reward,
        shaped_rewards=shaped_rewards(branch.calls, episode.events, reward, discount),
        metadata=facts | metadata,
    )


def items_of(branch: Branch) -> list[EpisodeItem]:
    """The branch's messages in order.

    Sampled assistant items carry `token_ids`, `logprobs` and `context_ids`; over a branch, `context_ids`
    and `token_ids` in turn make up the whole sequence. Assistant messages that the agent wrote into a
    prompt itself were not sampled: they have no tokens, empty logprobs and `given` in their metadata.
    """
    items: list[EpisodeItem] = []
    seen_messages, seen_tokens = 0, 0
    for call in branch.calls:
        items += [_given(message) for message in call.request.messages[seen_messages:]]
        items.append(_sampled(call, seen_tokens))
        seen_messages = len(call.request.messages) + 1
        seen_tokens = len(sequence_of(call) or ())
    return items


def shaped_rewards(
    calls: Sequence[Call], events: Sequence[Event], reward: float, discount: float
) -> list[float] | None:
    """The discounted return from each sampled item on: step rewards, and `reward` at the end.

    A step reward belongs to the branch's last call before it; one that was given before the first
    call was earned by none. None when the agent gave no step rewards.
    """
    steps = [0.0] * len(calls)
    given = False
    for event in events:
        earlier = [place for place, call in enumerate(calls) if call.index <= event.after_call]
        if event.kind == "step_reward" and event.value is not None and earlier:
            steps[earlier[-1]] += event.value
            given = True
    if not given:
        return None
    steps[-1] += reward
    return list(discounted_returns(steps, discount))


def require_tokens(episode: EpisodeRecord, branch: Branch, logprobs: bool) -> None:
    """Raise TrainingError unless every call of the branch has its token ids (and logprobs)."""
    for call in branch.calls:
        missing = _missing(call, logprobs)
        if missing:
            raise TrainingError(
                f"episode {episode.id!r}, call {call.index}: the model {call.model!r} returned no {missing}, "
                "and the trainer adapter needs them. Use an engine that returns them (an OpenAI-compatible "
                "endpoint with 'logprobs: true' and 'return_token_ids: true'), or an adapter that takes text."
            )


def _missing(call: Call, logprobs: bool) -> str | None:
    if sequence_of(call) is None:
        return "token ids"
    if logprobs and (call.completion is None or call.completion.logprobs is None):
        return "logprobs"
    return None


def _sampled(call: Call, seen_tokens: int) -> EpisodeItem:
    completion = call.completion
    if completion is None:
        raise ValueError(f"call {call.index} has no completion and cannot be part of a branch")
    prompt_ids = completion.prompt_ids
    facts: dict[str, Any] = {
        "call": call.index,
        "function": call.function,
        "finish_reason": completion.finish_reason,
        "model_version": completion.model_version,
        "temperature": call.request.sampling.temperature,
    }
    return EpisodeItem(
        role=EpisodeItemRole.ASSISTANT,
        content=text_of(completion.message),
        logprobs=completion.logprobs if completion.logprobs is not None else (),
        token_ids=completion.completion_ids,
        context_ids=None if prompt_ids is None else prompt_ids[seen_tokens:],
        metadata=facts | _extras(completion.message),
    )


def _given(message: Message) -> EpisodeItem:
    role = _ROLES.get(str(message.get("role")), EpisodeItemRole.OTHER)
    extras = _extras(message)
    if role is EpisodeItemRole.ASSISTANT:
        return EpisodeItem(
            role=role, content=text_of(message), logprobs=(), metadata=extras | {"given": True}
        )
    return EpisodeItem(role=role, content=text_of(message), metadata=extras or None)


def _extras(message: Message) -> dict[str, Any]:
    extras = {key: message[key] for key in _KEPT if message.get(key) is not None}
    if isinstance(message.get("content"), list):
        extras["content"] = message["content"]
    return extras
