"""From calls to branches to samples: which calls of an episode are one token sequence.

Training never tokenises text again, so two calls belong to one sequence only when the prompt of the
later one starts with exactly the tokens of the earlier one: its prompt and what was sampled. Any other
call starts a branch of its own. Answers that the limit of tokens cut off can be left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Literal, TypeAlias

from etude.core.call import Call, Sampling, continues
from etude.core.edge import thinking_key
from etude.core.episode import SIMULATED_USER, EpisodeRecord, Event
from etude.core.errors import TrainingError
from etude.core.message import Message, message_key
from etude.core.sample import PER_TOKEN, Kind, Pair, Sample, SampleOrPair, Turn, shared_length

CutOff: TypeAlias = Literal["train", "mask"]
"""Their treatment: trained on like others, or left out of the loss."""

CUT_OFF_PAIR = "pair in which a whole side was cut off"
CUT_OFF_SAMPLE = "sample in which every answer was cut off"


def count_cut_off(calls: Iterable[Call]) -> int:
    """How many of the calls have an answer that was cut off."""
    completions = (call.completion for call in calls)
    return sum(made is not None and made.finish_reason == "length" for made in completions)


def masked(unit: SampleOrPair, kind: Kind) -> SampleOrPair | str:
    """The unit without what was cut off in its loss; where nothing to learn from is left, the reason.

    A sample that is compared keeps its place in the group, and so counts in the mean. Of what is imitated,
    or has no token ids, such an answer becomes context. In a pair its tokens are masked.
    """
    if isinstance(unit, Pair):
        chosen, rejected = (replace(side, mask=_complete(side)) for side in unit.samples)
        if chosen.ids and rejected.ids:
            is_empty = not (any(chosen.mask[unit.shared :]) and any(rejected.mask[unit.shared :]))
        else:  # Texts are compared as wholes.
            is_empty = any(map(_is_cut, (*chosen.turns, *rejected.turns)))
        return CUT_OFF_PAIR if is_empty else replace(unit, chosen=chosen, rejected=rejected)
    if not any(map(_is_cut, unit.turns)):
        return unit
    if kind == "samples" and unit.ids:
        return unit.weighted(not _is_cut(turn) for turn in unit.turns)
    kept = [turn for turn in unit.turns if not _is_cut(turn)]
    if not kept:
        return CUT_OFF_SAMPLE
    # The others are context, and what follows the last is cut away.
    end, last = kept[-1].stop, kept[-1].message
    fields: dict[str, Any] = {"ids": unit.ids[:end], "mask": _complete(unit)[:end]}
    for name in PER_TOKEN:
        values = getattr(unit, name)
        fields[name] = None if values is None else values[:end]
    messages = unit.messages[: last + 1] if last >= 0 else unit.messages
    return replace(unit, turns=tuple(kept), messages=messages, **fields)


def _is_cut(turn: Turn) -> bool:
    return turn.finish_reason == "length"


def _complete(sample: Sample) -> tuple[bool, ...]:
    """The mask [T] without what was cut off."""
    complete = sample.by_token(not _is_cut(turn) for turn in sample.turns)
    return tuple(own and bool(kept) for own, kept in zip(sample.mask, complete, strict=True))


EVERY_FUNCTION = "*"
"""Stands for all functions among the targeted ones."""

UNTOLD = "the engine does not tell"
"""In place of a fault."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Calls that extend each other, in order; each has a completion."""

    index: int
    """Order within the episode, from 0."""
    calls: tuple[Call, ...]
    fault: str = ""
    """Where it began because a prompt repeated a conversation in other tokens: the kind of message that they
    are in; of an engine that does not tell, that it does not."""

    @property
    def drifted(self) -> bool:
        """Whether it began for that reason."""
        return bool(self.fault)


def branches_of(
    episode: EpisodeRecord, target_functions: Collection[str], target_model: str | None
) -> list[Branch]:
    """The branches of an episode, of calls by the functions (`*`: by any) to the model (None: to any)."""
    return branches_in([call for call in episode.calls if is_targeted(call, target_functions, target_model)])


def branches_in(calls: Sequence[Call]) -> list[Branch]:
    """The branches that answered calls make."""
    open_branches: list[list[Call]] = []
    faults: list[str] = []
    for call in calls:
        if call.completion is None:
            continue
        fitting = [branch for branch in open_branches if _extends(branch[-1], call)]
        if fitting:
            max(fitting, key=_length).append(call)
            continue
        # A fault without drift is a family that begins anew on purpose, like one that drops its thinking.
        drifted = call.completion.drifted or (
            not call.completion.fault
            and any(
                continues(call.request.messages, earlier) and not _extends(earlier, call)
                for branch in open_branches
                for earlier in branch
            )
        )
        faults.append((call.completion.fault or UNTOLD) if drifted else "")
        open_branches.append([call])
    return [*map(Branch, count(), map(tuple, open_branches), faults)]


def is_targeted(call: Call, target_functions: Collection[str], target_model: str | None) -> bool:
    """Whether a call was answered, by a model and for a function that are meant."""
    if call.completion is None or call.function == SIMULATED_USER:
        return False
    if call.function not in target_functions and EVERY_FUNCTION not in target_functions:
        return False
    return target_model is None or call.model == target_model


def _sequence_of(call: Call) -> tuple[int, ...] | None:
    """The tokens of a call, prompt and completion; None where the engine did not tell."""
    completion = call.completion
    if completion is None or completion.prompt_ids is None or completion.completion_ids is None:
        return None
    return completion.prompt_ids + completion.completion_ids


def _length(branch: Sequence[Call]) -> int:
    """The tokens of a branch, or its messages."""
    return len(_sequence_of(branch[-1]) or branch[-1].request.messages)


def _extends(earlier: Call, call: Call) -> bool:
    """By tokens where both calls have them, otherwise by messages."""
    sequence = _sequence_of(earlier)
    prompt = call.completion.prompt_ids if call.completion is not None else None
    if sequence is None or prompt is None:
        return continues(call.request.messages, earlier)
    return prompt[: len(sequence)] == sequence


def sample_of(
    branch: Branch,
    episode: EpisodeRecord,
    reward: float,
    discount: float = 1.0,
    *,
    agent: str | None = None,
    **notes: Any,
) -> Sample:
    """The sample of a branch. Its turns have returns where the agent gave step rewards.

    Without token ids of every call it has messages alone; see `require_tokens`.
    """
    ids: list[int] = []
    mask: list[bool] = []
    turns: list[Turn] = []
    messages: list[Message] = []
    known = all(_sequence_of(call) is not None for call in branch.calls)
    for call, value in zip(branch.calls, _returns(branch, episode, reward, discount), strict=True):
        completion = call.completion
        assert completion is not None, "a branch has answered calls"
        prompt, sampled = completion.prompt_ids or (), completion.completion_ids or ()
        if not known:
            prompt = sampled = ()
        mask += [False] * (len(prompt) - len(ids)) + [True] * len(sampled)
        ids += [*prompt[len(ids) :], *sampled]
        messages += call.request.messages[len(messages) :]
        turns.append(
            Turn(
                start=len(prompt),
                stop=len(ids),
                message=len(messages),
                sampling=drawn_by(call),
                model_version=None if call.logged else completion.model_version,
                value=value,
                call=call.index,
                function=call.function,
                finish_reason=completion.finish_reason,
                replaced=call.logged,
                token_ids=None if known else completion.completion_ids,
                logprobs=None if known else completion.logprobs,
            )
        )
        messages.append(completion.message)
    return Sample(
        ids=tuple(ids),
        mask=tuple(mask),
        logprobs=_logprobs(branch, episode, turns, len(ids)),
        turns=tuple(turns),
        reward=reward,
        example=episode.example.id,
        episode=episode.id,
        generation=episode.generation,
        branch=branch.index,
        agent=agent,
        messages=tuple(messages),
        tools=tuple(branch.calls[-1].request.tools),
        notes={"drifted": branch.drifted, **notes},
    )


def _returns(
    branch: Branch, episode: EpisodeRecord, reward: float, discount: float
) -> Sequence[float | None]:
    """The return of each call; None where its agent gave no step rewards."""
    functions = {None, *(call.function for call in branch.calls)}
    events = [event for event in episode.events if event.agent in functions]
    return step_returns(branch.calls, events, reward, discount) or [None] * len(branch.calls)


def drawn_by(call: Call) -> Sampling:
    """How a call's answer was sampled, as far as the distributions of its tokens depend on it."""
    sampling = call.request.sampling.shape()
    if call.completion is None or call.completion.constraint is None:
        return sampling
    return replace(sampling, constraint=call.completion.constraint)


def _logprobs(
    branch: Branch, episode: EpisodeRecord, turns: Sequence[Turn], length: int
) -> tuple[float, ...] | None:
    """Of all tokens; None where an engine did not tell them. Raises TrainingError for too few or many."""
    spread = [0.0] * length
    for call, turn in zip(branch.calls, turns, strict=True):
        if call.completion is None or call.completion.logprobs is None:
            return None
        if length and len(call.completion.logprobs) != turn.stop - turn.start:
            raise TrainingError(
                f"episode {episode.id!r}, call {call.index}: {len(call.completion.logprobs)} logprobs for "
                f"{turn.stop - turn.start} sampled tokens"
            )
        spread[turn.start : turn.stop] = call.completion.logprobs if length else ()
    return tuple(spread)


def with_turns(sample: Sample, field: str, values: Sequence[float] | None) -> Sample:
    """The sample with a field of each turn set: its return, for instance; None: for all of them to None."""
    row: Sequence[Any] = [None] * len(sample.turns) if values is None else values
    turns = (replace(turn, **{field: value}) for turn, value in zip(sample.turns, row, strict=True))
    return replace(sample, turns=tuple(turns))


def step_returns(
    calls: Sequence[Call], events: Sequence[Event], reward: float, discount: float
) -> list[float] | None:
    """The discounted return from each call on: step rewards, and `reward` at the end.

    A step reward belongs to the branch's last call before it; one that was given before the first
    call was earned by none. None when the agent gave no step rewards.
    """
    steps = [0.0] * len(calls)
    given = False
    for event in events:
        earlier = [index for index, call in enumerate(calls) if call.index <= event.after_call]
        if event.kind == "step_reward" and event.value is not None and earlier:
            steps[earlier[-1]] += event.value
            given = True
    if not given:
        return None
    steps[-1] += reward
    return discounted_returns(steps, discount)


def pair_of(chosen: Sample, rejected: Sample, **notes: Any) -> Pair | None:
    """The preference of one sample over another; None when there is no difference to learn from.

    They part where their tokens part. Over several turns a response is the whole rest of the conversation;
    the observations in it were not sampled and are masked (Rafailov et al., 2023). There is no difference
    when the sequences are equal, or when nothing was sampled after they part.
    """
    if not chosen.ids or not rejected.ids:
        differ = [*map(thinking_key, chosen.messages)] != [*map(thinking_key, rejected.messages)]
        return Pair(chosen, rejected, notes=notes) if differ else None
    start = shared_length(chosen.ids, rejected.ids)
    if not any(chosen.mask[start:]) or not any(rejected.mask[start:]):
        return None
    return Pair(chosen, rejected, start, notes)


def same_prompt(a: Sample, b: Sample) -> bool:
    """Whether both began with the same prompt: the tokens where they are known."""
    if a.ids and b.ids:
        return a.ids[: a.turns[0].start] == b.ids[: b.turns[0].start]
    prompts = (map(message_key, sample.messages[: sample.turns[0].message]) for sample in (a, b))
    first, second = map(list, prompts)
    return first == second


def require_tokens(episode: EpisodeRecord, branch: Branch, logprobs: bool) -> None:
    """Raise TrainingError unless every call of the branch has its token ids (and logprobs)."""
    for call in branch.calls:
        if call.logged:
            continue  # A backend makes its tokens of the text.
        has_ids = _sequence_of(call) is not None
        has_logprobs = call.completion is not None and call.completion.logprobs is not None
        if not has_ids or (logprobs and not has_logprobs):
            missing = "logprobs" if has_ids else "token ids"
            raise TrainingError(
                f"episode {episode.id!r}, call {call.index}: the model {call.model!r} returned no {missing}, "
                "and the trainer adapter needs them. Use an engine that returns them (an OpenAI-compatible "
                "endpoint with 'logprobs: true' and 'return_token_ids: true'), or an adapter that takes text."
            )


def discounted_returns(step_rewards: Sequence[float], discount: float) -> list[float]:
    """The return of each step: `G[t] = r[t] + discount * G[t + 1]`.

    Sutton and Barto, Reinforcement Learning (2018), equation 3.9. As many values as steps. Raises
    ValueError for a discount outside [0, 1].
    """
    if not 0 <= discount <= 1:
        raise ValueError(f"a discount must lie between 0 and 1, found {discount}")
    returns: list[float] = []
    following = 0.0
    for reward in reversed(step_rewards):
        following = reward + discount * following
        returns.append(following)
    return returns[::-1]
