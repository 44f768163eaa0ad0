"""The conversion between samples and the toolkit's trajectories, in both directions.

A user's builder makes trajectories, and a user's adapter takes them; Etude's own parts pass samples.
Everything that a gradient depends on is a typed field on both sides; `metadata` is for people.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, Self, TypeAlias, cast

from pydantic import Field, GetPydanticSchema, InstanceOf, computed_field, field_validator
from pydantic_core import to_json

from etude.core.call import Sampling
from etude.core.data_model import DataModel
from etude.core.errors import RequestError, TrainingError
from etude.core.message import Message, OpenAIMessage, Tool, message_key, message_text
from etude.core.sample import Kind, Pair, Sample, SampleOrPair, Turn, shared_length
from etude.core.trajectory import DPOItem, EpisodeItem, EpisodeItemRole, Method, Trajectory

Ids = tuple[int, ...]

TrainingUnit: TypeAlias = SampleOrPair | Trajectory
"""A sample or a pair, or either of them as a trajectory."""

_KEPT = ("reasoning_content", "tool_calls", "tool_call_id", "name", "function_call", "refusal")
_ROLES = {role.value: role for role in EpisodeItemRole} | {"developer": EpisodeItemRole.SYSTEM}

_WRITTEN = {EpisodeItemRole.ENVIRONMENT: "user", EpisodeItemRole.OTHER: "user"}

_AS_LISTS = list[list[InstanceOf[Sample] | InstanceOf[Pair] | Trajectory]]


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """A group of a collection without its data, for metrics and the curriculum."""

    example: str | None
    size: int
    """The number of its units."""
    rewards: Sequence[float]
    """The rewards of all its episodes if the builder tells them, else of its units: an episode may have
    several units, and a pair only has a difference of rewards."""
    returns: Sequence[float | None]
    """The returns of all turns, in units whose agent gave step rewards."""


class TrajectoryCollection(DataModel):
    """The samples or pairs of one epoch, in groups. A group starts from one example (or one turn)."""

    groups: Annotated[
        Sequence[Sequence[TrainingUnit]], GetPydanticSchema(lambda _, schema: schema(_AS_LISTS))
    ] = Field(default_factory=list, alias="trajectories", exclude=True)
    """The units as their maker passed them: samples, pairs or trajectories."""
    run_id: str
    method: Method = "grpo"
    """The algorithm that the units were made for."""

    @field_validator("groups", mode="before")
    @classmethod
    def _are_groups(cls, groups: Any) -> Any:
        units = Sample | Pair | Trajectory
        if isinstance(groups, list | tuple) and any(isinstance(each, units) for each in groups):
            raise ValueError("a collection is a list of groups, each a list of trajectories: [[first, …], …]")
        return groups

    def __len__(self) -> int:
        """Return the number of units in all groups together."""
        return sum(map(len, self.groups))

    @property
    def figures(self) -> list[GroupFigures]:
        """The figures of each group."""
        return [
            GroupFigures(
                _example(group[0]) if group else None,
                len(group),
                tuple((group[0].group_rewards if group else None) or [unit.reward for unit in group]),
                [value for unit in group for value in _returns(unit) or ()],
            )
            for group in self.groups
        ]

    @computed_field(repr=False)  # type: ignore[prop-decorator]  # the order that pydantic documents
    @property
    def trajectories(self) -> list[list[Trajectory]]:
        """The groups as trajectories, converted on first use. They then replace the samples and pairs, so
        that changes to them count."""
        if not all(isinstance(unit, Trajectory) for group in self.groups for unit in group):
            self.groups = [[*map(to_trajectory, group)] for group in self.groups]
        return cast("list[list[Trajectory]]", self.groups)

    @trajectories.setter
    def trajectories(self, groups: Sequence[Sequence[TrainingUnit]]) -> None:
        """Replace the groups."""
        self.groups = groups

    def data_hash(self) -> str:
        """Hash the data, regardless of the collection's name. Returns 32 hexadecimal digits."""
        digest = hashlib.blake2b(self.method.encode(), digest_size=16)
        for group in self.groups:
            digest.update(b"\n[")
            for unit in group:
                digest.update(to_json(unit, fallback=float, inf_nan_mode="constants") + b"\n")
        return digest.hexdigest()

    def model_copy(self, *, update: Any = None, deep: bool = False) -> Self:
        """Return a copy with other fields, which may include `trajectories`."""
        changes = dict(update or {})
        if "trajectories" in changes:
            changes["groups"] = changes.pop("trajectories")
        return super().model_copy(update=changes, deep=deep)


def _example(unit: TrainingUnit) -> str | None:
    return unit.example_id if isinstance(unit, Trajectory) else unit.samples[0].example


def _returns(unit: TrainingUnit) -> Sequence[float | None] | None:
    if isinstance(unit, Trajectory):
        return unit.shaped_rewards
    return unit.returns if isinstance(unit, Sample) else None


@dataclass(frozen=True, slots=True)
class Encoder:
    """Tokenises messages and texts that were never sampled."""

    prompt: Callable[[Sequence[Message]], Ids]
    answer: Callable[[str], Ids]
    """Tokenises an answer, including its end of turn."""
    transcript: Callable[[Sequence[Message], Sequence[Tool]], tuple[Ids, tuple[bool, ...]]] | None = None
    """Tokenises a finished conversation, with a mask of the tokens that the assistant would have sampled."""


def to_trajectory(unit: TrainingUnit) -> Trajectory:
    """Return a sample or a pair as a trajectory. The reward of a pair is the difference of the two."""
    if isinstance(unit, Trajectory):
        return unit
    first = unit.samples[0]
    facts: dict[str, Any] = {"id": first.example}
    if isinstance(unit, Pair):
        fields: dict[str, Any] = {"episode": [_preference(unit)]}
    else:
        facts |= {"generation": unit.generation, "episode": unit.episode, "branch": unit.branch}
        facts |= {"agent": unit.agent} if unit.agent is not None else {}
        facts |= unit.notes
        fields = {"episode": _items(unit), "shaped_rewards": unit.returns}
    return Trajectory(
        reward=unit.reward,
        example_id=first.example,
        episode_id=first.episode,
        agent=first.agent,
        tools=list(first.tools) or None,
        group_rewards=None if unit.group_rewards is None else list(unit.group_rewards),
        metadata=facts,
        **fields,
    )


def learning_units(
    unit: TrainingUnit, kind: Kind, encoder: Encoder | None = None, *, needs_logprobs: bool = True
) -> list[SampleOrPair]:
    """Return the sample or pairs that a learner takes; a unit that has all its tokens is returned unchanged.

    `encoder` tokenises what is only text. Raises TrainingError, which names the episode.
    """
    if not isinstance(unit, Trajectory) and isinstance(unit, Pair) == (kind == "pairs"):
        has_tokens = (
            sample.ids
            and not any(turn.replaced for turn in sample.turns)
            and not (needs_logprobs and sample.logprobs is None)
            for sample in unit.samples
        )
        if all(has_tokens):
            return [unit]
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
        raise TrainingError(f"episode {trajectory.episode_id or '?'} has {error}") from None


def item_message(item: EpisodeItem) -> Message:
    """Return an item as a message. An assistant message that is context gets the `weight` 0."""
    facts = item.metadata or {}
    extras = {key: facts[key] for key in _KEPT if facts.get(key) is not None and key != "function_call"}
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
            "local, or openai with return_token_ids: true, where a router before it passes that on)"
        )
    logprobs = logprobs or (() if needs_logprobs else (0.0,) * len(ids))
    return item.model_copy(update={"token_ids": ids, "logprobs": logprobs})


def _items(sample: Sample) -> list[EpisodeItem]:
    """Return the messages in order, with all tokens; for a sample without messages, only the answers."""
    items: list[EpisodeItem] = []
    seen = 0
    for turn, tokens in sample.answers:
        index = turn.message
        items += map(_prompt_item, sample.messages[seen : max(index, 0)])
        seen = index + 1
        message = sample.messages[index] if index >= 0 else {}
        own = tokens if sample.ids else tokens | {"context_ids": None, "token_ids": turn.token_ids}
        own["logprobs"] = own["logprobs"] or turn.logprobs or ()
        if turn.replaced:
            own |= {"token_ids": None, "logprobs": ()}
        item = EpisodeItem(
            role=EpisodeItemRole.ASSISTANT,
            content=message_text(message),
            replaced=turn.replaced,
            sampling=turn.sampling,
            model_version=turn.model_version,
            finish_reason=turn.finish_reason,
            call=turn.call,
            function=turn.function,
            metadata=_extras(message) or None,
            **own,
        )
        items.append(item)
    return [*items, *map(_prompt_item, sample.messages[seen:])]


def _prompt_item(message: Message) -> EpisodeItem:
    """Return a prompt message as an item. An assistant message that the agent wrote counts as given."""
    role = _ROLES.get(str(message.get("role")), EpisodeItemRole.OTHER)
    spoken: dict[str, Any] = {"logprobs": (), "given": True} if role is EpisodeItemRole.ASSISTANT else {}
    return EpisodeItem(role=role, content=message_text(message), metadata=_extras(message) or None, **spoken)


def _extras(message: Message) -> dict[str, Any]:
    extras = {key: message[key] for key in _KEPT if message.get(key) is not None}
    if isinstance(message.get("content"), list):
        extras["content"] = message["content"]
    return extras


def _preference(pair: Pair) -> DPOItem:
    sides = (pair.chosen.messages, pair.rejected.messages)
    shared = shared_length(*([*map(thinking_key, messages)] for messages in sides))
    chosen, rejected = (messages[shared:] for messages in sides)
    start = pair.shared
    tokens: dict[str, Any] = {}
    if pair.chosen.ids and pair.rejected.ids:
        tokens["prompt_ids"] = pair.chosen.ids[:start]
        for name, sample in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            tokens[f"{name}_ids"] = sample.ids[start:]
            tokens[f"{name}_mask"] = sample.mask[start:]
            if sample.logprobs is not None:
                tokens[f"{name}_logprobs"] = sample.logprobs[start:]
    return DPOItem(
        prompt=[*map(_flat, pair.chosen.messages[:shared])],
        chosen_response=_response(chosen),
        rejected_response=_response(rejected),
        chosen_messages=[*map(_flat, chosen)],
        rejected_messages=[*map(_flat, rejected)],
        sampling=pair.chosen.turns[0].sampling,
        turns=len(pair.chosen.turns),
        chosen_episode=pair.chosen.episode,
        rejected_episode=pair.rejected.episode,
        **tokens,
    )


def thinking_key(message: Message) -> tuple[str, str]:
    """Return a key that is equal for messages with equal content and equal thinking."""
    return message_key(message), str(message.get("reasoning_content") or "")


def _flat(message: Message) -> OpenAIMessage:
    """Return the message with its content as text. Parts that are not text are dropped."""
    flat = {"content": message_text(message)} if isinstance(message.get("content"), list) else {}
    return OpenAIMessage.model_validate(message | flat)


def _response(messages: Sequence[Message]) -> str:
    """Return one reply as its text, and a longer continuation as a transcript."""
    if len(messages) == 1:
        return plain_text(messages[0])
    return "\n\n".join(f"[{str(message.get('role')).upper()}]: {plain_text(message)}" for message in messages)


def plain_text(message: Message) -> str:
    """Return the text of a message, or its tool calls as JSON if it has no text."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return message_text(message) or (json.dumps(calls, ensure_ascii=False) if calls else "")


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
