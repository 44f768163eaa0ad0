"""The conversion of trajectories that users' parts made, and of texts, to samples with tokens.

Everything that a gradient depends on is a typed field on both sides; `metadata` is for people.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from etude.core.call import Sampling
from etude.core.errors import RequestError, TrainingError
from etude.core.message import Message, Tool
from etude.core.sample import Kind, Pair, Sample, SampleOrPair, TrainingUnit, Turn, to_trajectory
from etude.core.trajectory import MESSAGE_FIELDS, DPOItem, EpisodeItem, EpisodeItemRole, Trajectory

Ids = tuple[int, ...]

_WRITTEN = {EpisodeItemRole.ENVIRONMENT: "user", EpisodeItemRole.OTHER: "user"}


@dataclass(frozen=True, slots=True)
class Encoder:
    """Tokenises messages and texts that were never sampled."""

    prompt: Callable[[Sequence[Message]], Ids]
    answer: Callable[[str], Ids]
    """Tokenises an answer, including its end of turn."""
    transcript: Callable[[Sequence[Message], Sequence[Tool]], tuple[Ids, tuple[bool, ...]]] | None = None
    """Tokenises a finished conversation, with a mask of the tokens that the assistant would have sampled."""


def convert_unit(
    unit: TrainingUnit, kind: Kind, encoder: Encoder | None = None, *, needs_logprobs: bool = True
) -> list[SampleOrPair]:
    """Return the sample or pairs that a learner takes for a unit that lacks tokens, or is a trajectory.

    `encoder` tokenises what is only text. Raises TrainingError, which names the episode.
    """
    trajectory = to_trajectory(unit)
    if kind != "pairs":
        return [to_sample(trajectory, encoder, needs_logprobs=needs_logprobs)]
    pairs: list[SampleOrPair] = []
    for item in trajectory.episode:
        if not isinstance(item, DPOItem):
            raise TrainingError("DPO trains on preferences (DPOItem), and found an episode; use builder dpo")
        pairs.append(_make_pair(item, trajectory.tools or (), encoder, needs_logprobs))
    return pairs


def to_sample(
    trajectory: Trajectory, encoder: Encoder | None = None, *, needs_logprobs: bool = True
) -> Sample:
    """Return a trajectory as a sample with tokens. Raises TrainingError if tokens are missing."""
    items: list[EpisodeItem] = []
    for item in trajectory.episode:
        if not isinstance(item, EpisodeItem):
            raise TrainingError("this algorithm trains on episodes, and found a preference (DPOItem)")
        if item.is_sampled:
            items.append(item)
    write = None if encoder is None else encoder.transcript
    if write is not None and items and all(item.replaced and item.context_ids is None for item in items):
        messages = [item_message(item) for item in trajectory.episode if isinstance(item, EpisodeItem)]
        try:
            ids, sampled = write(messages, trajectory.tools or ())
        except RequestError as error:
            raise TrainingError(f"{trajectory.example_id or 'a conversation'}: {error}") from error
        return Sample(ids, sampled, example=trajectory.example_id)
    returns: Sequence[float | None] = trajectory.shaped_rewards or [None] * len(items)
    try:
        if len(returns) != len(items):
            raise ValueError(f"{len(returns)} shaped rewards for {len(items)} sampled messages")
        return Sample.from_turns(
            [
                (
                    Turn(
                        sampling=item.sampling,
                        model_version=item.model_version,
                        finish_reason=item.finish_reason,
                        call=item.call,
                        function=item.function,
                        value=value,
                    ),
                    _with_tokens(item, encoder, needs_logprobs),
                )
                for item, value in zip(items, returns, strict=True)
            ],
            reward=trajectory.reward,
            example=trajectory.example_id,
            episode=trajectory.episode_id,
            agent=trajectory.agent,
        )
    except ValueError as error:
        episode, example = trajectory.episode_id, trajectory.example_id
        what = f"episode {episode}" if episode else f"a trajectory of example {example}"
        raise TrainingError(f"{what} has {error}") from None


def item_message(item: EpisodeItem) -> Message:
    """Return an item as a message. An assistant message that is context gets the `weight` 0."""
    facts = item.metadata or {}
    kept = (key for key in MESSAGE_FIELDS if key != "function_call")
    extras = {key: facts[key] for key in kept if facts.get(key) is not None}
    content = facts.get("content", item.content)
    message: Message = {"role": _WRITTEN.get(item.role, str(item.role)), "content": content, **extras}
    if extras.get("tool_calls") and not content:
        message["content"] = None
    if item.given:
        message["weight"] = 0
    return message


def _with_tokens(item: EpisodeItem, encoder: Encoder | None, needs_logprobs: bool) -> EpisodeItem:
    """Return the item with its tokens. Raises ValueError if they are unknown."""
    ids, logprobs = item.token_ids, item.logprobs
    if ids is None and item.replaced and encoder is not None:
        ids = encoder.answer(item.content)
        logprobs = (0.0,) * len(ids)
    if ids is None or item.context_ids is None:
        raise ValueError(
            "no token ids, which training needs; sample it with an engine that returns them (llms _type: "
            "local, or openai with return_token_ids: true, where a router before it passes that on), and set "
            "`token_ids` and `context_ids` of the items of a builder of your own"
        )
    logprobs = logprobs or (() if needs_logprobs else (0.0,) * len(ids))
    return item.model_copy(update={"token_ids": ids, "logprobs": logprobs})


def _make_pair(item: DPOItem, tools: Sequence[Tool], encoder: Encoder | None, needs_logprobs: bool) -> Pair:
    prompt = item.prompt_ids
    known = prompt is not None and item.chosen_ids is not None and item.rejected_ids is not None
    if not known:
        if encoder is None:
            raise TrainingError("a preference has no token ids, and there is no tokenizer for its texts")
        if not needs_logprobs and (written := _written_pair(item, tools, encoder)) is not None:
            return written
        prompt = encoder.prompt(item.prompt_messages)
    assert prompt is not None
    sides: dict[str, Sample] = {}
    for name in ("chosen", "rejected"):
        ids, logprobs, mask = (getattr(item, f"{name}_{field}") for field in ("ids", "logprobs", "mask"))
        if not known and encoder is not None:
            ids, logprobs, mask = encoder.answer(getattr(item, f"{name}_response")), None, None
        if needs_logprobs and not logprobs:
            raise TrainingError(
                "a preference has no logprobs of the policy that sampled it, which is DPO's reference; set "
                "'reference: base' in the trajectory builder"
            )
        if len(mask or ids) != len(ids) or len(logprobs or ids) != len(ids):
            raise TrainingError("a preference has a mask or logprobs of another length than its token ids")
        sampled = (False,) * len(prompt) + (mask or (True,) * len(ids))
        sides[name] = Sample(
            ids=prompt + ids,
            mask=sampled,
            logprobs=(0.0,) * len(prompt) + (logprobs or (0.0,) * len(ids)),
            turns=_turns(sampled, item.sampling),
            episode=getattr(item, f"{name}_episode"),
        )
    return Pair(sides["chosen"], sides["rejected"], len(prompt))


def _written_pair(item: DPOItem, tools: Sequence[Tool], encoder: Encoder) -> Pair | None:
    """Return the pair of two conversations that were not sampled; None if some messages are unknown."""
    chosen, rejected = item.chosen_messages, item.rejected_messages
    if encoder.transcript is None or chosen is None or rejected is None or isinstance(item.prompt, str):
        return None
    context = [
        message | {"weight": 0} if message["role"] == "assistant" else message
        for message in item.prompt_messages
    ]
    sides: list[Sample] = []
    for answer in (chosen, rejected):
        ids, mask = encoder.transcript([*context, *(message.to_wire() for message in answer)], tools)
        turns = _turns(mask, item.sampling)
        sides.append(Sample(ids, tuple(map(bool, mask)), (0.0,) * len(ids), turns=turns))
    return Pair(sides[0], sides[1])


def _turns(mask: Sequence[bool], sampling: Sampling) -> tuple[Turn, ...]:
    """Return a turn for each run of consecutive sampled tokens."""
    turns, start = [], 0
    for is_sampled, run in groupby(mask):
        stop = start + len(list(run))
        turns += [Turn(start, stop, sampling=sampling)] if is_sampled else []
        start = stop
    return tuple(turns)
