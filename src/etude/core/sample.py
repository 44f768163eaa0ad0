"""Samples: the one value from the recorder's branches to the gradient, also in files and on the wire.

A collection holds the samples of one epoch. Its trajectories are a view, made when a user's part asks.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import gt, mul
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeGuard, cast

from pydantic import Field, GetPydanticSchema, InstanceOf, computed_field, field_validator
from pydantic_core import to_json

from etude.core.call import PLAIN_SAMPLING, Sampling
from etude.core.data_model import DataModel
from etude.core.errors import TrainingError
from etude.core.message import Message, OpenAIMessage, Tool, message_text, plain_text, thinking_key
from etude.core.trajectory import MESSAGE_FIELDS, DPOItem, EpisodeItem, EpisodeItemRole, Method, Trajectory

Kind = Literal["samples", "pairs", "imitation"]
"""The data that an algorithm needs: samples with logprobs, pairs, or samples to imitate without logprobs."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer within a sample: `ids[start:stop]` are its tokens."""

    start: int = 0
    stop: int = 0
    message: int = -1
    """Index of the answer in the sample's messages; -1 if the sample has none."""
    sampling: Sampling = PLAIN_SAMPLING
    """The sampling parameters that change the distributions of its tokens."""
    model_version: int | None = None
    """Version of the weights that sampled it; None if unknown."""
    call: int | None = None
    """Index of the call within the episode."""
    function: str | None = None
    """The agent's function that made the call."""
    finish_reason: str = "stop"
    value: float | None = None
    """Discounted return from this answer on, if the agent gave step rewards."""
    replaced: bool = False
    """Whether its text replaces the sampled answer. It has no tokens until a backend tokenises the text."""
    token_ids: tuple[int, ...] | None = None
    """The sampled tokens, if the engine returns no prompt tokens, for backends that render prompts
    themselves."""
    logprobs: tuple[float, ...] | None = None
    """Logprobs of `token_ids`."""


PER_TOKEN = ("logprobs", "advantages", "weights", "teacher_logprobs")
"""The fields of a sample that hold one number per token."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One token sequence to train on. All per-token fields have the length T of `ids`."""

    ids: tuple[int, ...] = ()
    """Tokens of prompts and answers in order; empty if the engine returns no token ids."""
    mask: tuple[bool, ...] = ()
    """True for the tokens that the policy sampled: the ones that are trained on."""
    logprobs: tuple[float, ...] | None = None
    """Logprobs under the distributions sampled from; 0 where the mask is False. None if the engine gives
    none."""
    advantages: tuple[float, ...] | None = None
    """How much better than expected each token was; None until an algorithm sets it."""
    weights: tuple[float, ...] | None = None
    """Weight of each token in the loss, which replaces the mask."""
    teacher_logprobs: tuple[float, ...] | None = None
    """Logprobs of the same tokens under a teacher model."""
    turns: tuple[Turn, ...] = ()
    reward: float = 0.0
    example: str | None = None
    episode: str | None = None
    """Id of the episode. Its samples (branches) count as one in a group's statistics."""
    generation: int | None = None
    branch: int = 0
    agent: str | None = None
    """The agent that gave these answers, in an episode with named agents."""
    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)
    """Facts for people to read. Nothing depends on them."""
    group_rewards: Sequence[float] | None = None
    """Rewards of all episodes of the group, including those that are not trained on."""

    def __post_init__(self) -> None:
        length = len(self.ids)
        given = (self.mask, self.logprobs, self.advantages, self.weights, self.teacher_logprobs)
        for values in given:
            if values is not None and len(values) != length:
                lengths = {length, *(len(values) for values in given if values is not None)}
                raise ValueError(f"per-token fields differ in length: {sorted(lengths)}")

    @classmethod
    def from_turns(cls, turns: Sequence[tuple[Turn, Any]], **facts: Any) -> Self:
        """Make a sample of turns in order, and set their `start` and `stop`.

        Each turn comes with an object that has its tokens. Its `context_ids` are the tokens since the turn
        before, as the model saw them. Its `token_ids` are the sampled ones. The names in `PER_TOKEN` have one
        number per sampled token; if one of these is None, the sample's field is None. Raises ValueError if
        lengths differ.
        """
        ids: list[int] = []
        mask: list[bool] = []
        placed: list[Turn] = []
        for turn, own in turns:
            for name in PER_TOKEN:
                numbers = getattr(own, name)
                if numbers is not None and len(numbers) != len(own.token_ids):
                    raise ValueError(f"{len(numbers)} {name} for {len(own.token_ids)} sampled tokens")
            start = len(ids) + len(own.context_ids)
            ids += [*own.context_ids, *own.token_ids]
            mask += [False] * len(own.context_ids) + [True] * len(own.token_ids)
            placed.append(replace(turn, start=start, stop=len(ids)))
        for name in PER_TOKEN:
            if turns and all(getattr(own, name) is not None for _, own in turns):
                spread: list[float] = []
                for _, own in turns:
                    spread += [0.0] * len(own.context_ids) + [*map(float, getattr(own, name))]
                facts[name] = tuple(spread)
        return cls(ids=tuple(ids), mask=tuple(mask), turns=tuple(placed), **facts)

    @property
    def answers(self) -> list[tuple[Turn, dict[str, Any]]]:
        """The turns with their tokens, under the names that `from_turns` takes. Tokens of an answer that the
        mask leaves out have the weight 0. Raises TrainingError if it has tokens outside of the turns."""
        per_token = {name: getattr(self, name) for name in PER_TOKEN}
        spoken = self.by_token([1.0] * len(self.turns))
        if any(map(gt, self.mask, spoken)):
            raise TrainingError(f"episode {self.episode or '?'}: the mask has tokens outside of its turns")
        if self.weights is None and self.mask != spoken:
            per_token["weights"] = tuple(map(float, self.mask))
        answers, end = [], 0
        for turn in self.turns:
            own = slice(turn.start, turn.stop)
            tokens: dict[str, Any] = {"context_ids": self.ids[end : turn.start], "token_ids": self.ids[own]}
            for name, values in per_token.items():
                tokens[name] = None if values is None else values[own]
            answers.append((turn, tokens))
            end = turn.stop
        return answers

    @property
    def samples(self) -> tuple[Self, ...]:
        """A tuple with this sample, for learners, which take samples and pairs."""
        return (self,)

    @property
    def loss_weights(self) -> Sequence[float]:
        """Weight of each token in the loss [T]."""
        return self.mask if self.weights is None else self.weights

    @property
    def gains(self) -> Sequence[float]:
        """The advantages [T]. Without advantages, the mask: 1 for each sampled token."""
        return self.mask if self.advantages is None else self.advantages

    @property
    def has_gradient(self) -> bool:
        """Whether any token has both a weight and an advantage."""
        return any(map(mul, self.loss_weights, self.gains))

    @property
    def returns(self) -> list[float] | None:
        """The return of each turn; None if the agent gave no step rewards."""
        if all(turn.value is None for turn in self.turns):
            return None
        return [self.reward if turn.value is None else turn.value for turn in self.turns]

    def scale_weights(self, factors: Iterable[float]) -> Self:
        """Return the sample with the weights of each turn's tokens multiplied by a factor."""
        return replace(self, weights=tuple(map(mul, self.loss_weights, self.by_token(factors))))

    def by_token(self, values: Iterable[float]) -> tuple[float, ...]:
        """Spread one number per turn over its tokens [T], with 0 for tokens that were not sampled."""
        spread = [0.0] * len(self.ids)
        for turn, value in zip(self.turns, values, strict=True):
            spread[turn.start : turn.stop] = [value] * (turn.stop - turn.start)
        return tuple(spread)


@dataclass(frozen=True, slots=True)
class Pair:
    """A preference. Both samples begin with the same `shared` tokens, which are not trained on."""

    chosen: Sample
    rejected: Sample
    shared: int = 0
    group_rewards: Sequence[float] | None = None
    """Rewards of all episodes of the group, including those that are not trained on."""

    def __post_init__(self) -> None:
        for name, sample in (("chosen", self.chosen), ("rejected", self.rejected)):
            mask = (False,) * min(self.shared, len(sample.ids)) + sample.mask[self.shared :]
            object.__setattr__(self, name, replace(sample, mask=mask))

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Both samples, as learners take them."""
        return (self.chosen, self.rejected)

    @property
    def reward(self) -> float:
        """The reward of the chosen sample minus the reward of the rejected one."""
        return self.chosen.reward - self.rejected.reward


SampleOrPair: TypeAlias = Sample | Pair
"""The unit of learning. The two samples of a pair share one optimiser step and one micro-batch."""

TrainingUnit: TypeAlias = SampleOrPair | Trajectory
"""A sample or a pair, or either of them as a trajectory."""

Unit: TypeAlias = Sequence[Sample]
"""Samples that must be trained on together: one, or (chosen, rejected)."""


def is_complete(unit: TrainingUnit, kind: Kind, *, needs_logprobs: bool) -> TypeGuard[SampleOrPair]:
    """Return whether a unit is what a learner of this kind of data takes, with all its tokens."""
    return (
        not isinstance(unit, Trajectory)
        and isinstance(unit, Pair) == (kind == "pairs")
        and all(
            sample.ids
            and not any(turn.replaced for turn in sample.turns)
            and not (needs_logprobs and sample.logprobs is None)
            for sample in unit.samples
        )
    )


def has_gradient(unit: Unit) -> bool:
    """Return whether training on a unit gives a gradient."""
    return any(sample.has_gradient for sample in unit)


def is_trained(unit: Unit) -> bool:
    """Return whether any token of a unit is trained on."""
    return any(any(sample.loss_weights) for sample in unit)


def trained_tokens(units: Iterable[Unit]) -> int:
    """Return the number of tokens that are trained on."""
    return sum(1 for unit in units for sample in unit for weight in sample.loss_weights if weight)


def shared_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the length of the longest common prefix of two lists, tuples or texts, found by bisection."""
    same, differs = 0, min(len(a), len(b)) + 1
    if a[: differs - 1] == b[: differs - 1]:
        return differs - 1
    while differs - same > 1:
        middle = (same + differs) // 2
        if a[same:middle] == b[same:middle]:
            same = middle
        else:
            differs = middle
    return same


_ROLES = {role.value: role for role in EpisodeItemRole} | {"developer": EpisodeItemRole.SYSTEM}

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
    extras = {key: message[key] for key in MESSAGE_FIELDS if message.get(key) is not None}
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


def _flat(message: Message) -> OpenAIMessage:
    """Return the message with its content as text. Parts that are not text are dropped."""
    flat = {"content": message_text(message)} if isinstance(message.get("content"), list) else {}
    return OpenAIMessage.model_validate(message | flat)


def _response(messages: Sequence[Message]) -> str:
    """Return one reply as its text, and a longer continuation as a transcript."""
    if len(messages) == 1:
        return plain_text(messages[0])
    return "\n\n".join(f"[{str(message.get('role')).upper()}]: {plain_text(message)}" for message in messages)
