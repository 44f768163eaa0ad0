"""From scored episodes to samples: which calls of an episode form one token sequence.

Training never tokenises text again. So two calls form one sequence only if the later prompt starts with
exactly the tokens of the earlier call: its prompt and its sampled tokens. Any other call starts a new branch.
Answers cut off at the token limit can be left out.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self, TypeAlias

from etude.core.call import Call, continues
from etude.core.episode import SIMULATED_USER, EpisodeRecord, Event
from etude.core.errors import RequestError, TrainingError
from etude.core.message import Message, message_key, thinking_key
from etude.core.sample import Kind, Pair, Sample, SampleOrPair, Turn, shared_length
from etude.protocols.tree import EpisodeTree

CutOff: TypeAlias = Literal["train", "mask"]
"""The treatment of cut-off answers: trained on like others, or left out of the loss."""

CUT_OFF = "sample or pair with an answer that was cut off"
IDLE = "group without an advantage, and no other term of the loss that moves the policy"


def count_cut_off(calls: Iterable[Call]) -> int:
    """Return how many of the calls have a cut-off answer."""
    completions = (call.completion for call in calls)
    return sum(made is not None and made.finish_reason == "length" for made in completions)


EVERY_FUNCTION = "*"
"""Stands for all functions among the targeted ones."""

UNTOLD = "the engine does not say"
"""Replaces a fault that the engine does not report."""


def targeted_calls(
    episode: EpisodeRecord, target_functions: Collection[str], target_model: str | None
) -> list[Call]:
    """Return the answered calls by the functions (`*`: any) to the model (None: any)."""
    return [call for call in episode.calls if is_targeted(call, target_functions, target_model)]


def find_branches(calls: Sequence[Call]) -> list[tuple[list[Call], str]]:
    """Return the branches of answered calls: calls that extend each other, in order, and a branch's fault.

    The fault says why the branch began, if a prompt repeated a conversation in other tokens: the kind of
    message with the difference, or `UNTOLD`. It is empty for any other beginning.
    """
    branches: list[tuple[list[Call], str]] = []
    for call in calls:
        if call.completion is None:
            continue
        fitting = [branch for branch, _ in branches if _extends(branch[-1], call)]
        if fitting:
            max(fitting, key=_length).append(call)
            continue
        # A fault without drift is a family that starts anew on purpose, such as one that drops its thinking.
        drifted = call.completion.drifted or (
            not call.completion.fault
            and any(
                continues(call.request.messages, earlier) and not _extends(earlier, call)
                for branch, _ in branches
                for earlier in branch
            )
        )
        branches.append(([call], (call.completion.fault or UNTOLD) if drifted else ""))
    return branches


def is_targeted(call: Call, target_functions: Collection[str], target_model: str | None) -> bool:
    """Return whether a call was answered and belongs to the targeted functions and model."""
    if call.completion is None or call.function == SIMULATED_USER:
        return False
    if call.function not in target_functions and EVERY_FUNCTION not in target_functions:
        return False
    return target_model is None or call.model == target_model


def _call_tokens(call: Call) -> tuple[int, ...] | None:
    """Return the tokens of a call, prompt and completion, or None if the engine did not return them."""
    completion = call.completion
    if completion is None or completion.prompt_ids is None or completion.completion_ids is None:
        return None
    return completion.prompt_ids + completion.completion_ids


def _length(branch: Sequence[Call]) -> int:
    """Return the number of tokens of a branch, or else of its messages."""
    return len(_call_tokens(branch[-1]) or branch[-1].request.messages)


def _extends(earlier: Call, call: Call) -> bool:
    """Return whether `call` extends `earlier`: by tokens if both have them, otherwise by messages."""
    sequence = _call_tokens(earlier)
    prompt = call.completion.prompt_ids if call.completion is not None else None
    if sequence is None or prompt is None:
        return continues(call.request.messages, earlier)
    return prompt[: len(sequence)] == sequence


class _TurnTokens(NamedTuple):
    """The tokens of a turn, as `Sample.from_turns` takes them."""

    context_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float] | None
    advantages: None = None
    weights: None = None
    teacher_logprobs: None = None


def make_sample(
    calls: Sequence[Call],
    episode: EpisodeRecord,
    reward: float,
    *,
    branch: int = 0,
    returns: Mapping[int, float] | None = None,
    agent: str | None = None,
    **notes: Any,
) -> Sample:
    """Return the sample of a branch's calls, with their `returns` by the calls' indices.

    It has only messages if any call lacks token ids; see `require_tokens`.
    """
    known = all(_call_tokens(call) is not None for call in calls)
    turns: list[tuple[Turn, _TurnTokens]] = []
    messages: list[Message] = []
    length = 0
    for call in calls:
        completion, shape = call.completion, call.request.sampling.shape()
        assert completion is not None, "a branch has answered calls"
        messages += call.request.messages[len(messages) :]
        turn = Turn(
            message=len(messages),
            sampling=replace(shape, constraint=completion.constraint or shape.constraint),
            model_version=None if call.logged else completion.model_version,
            call=call.index,
            function=call.function,
            finish_reason=completion.finish_reason,
            value=None if returns is None else returns[call.index],
            replaced=call.logged,
            token_ids=None if known else completion.completion_ids,
            logprobs=None if known else completion.logprobs,
        )
        messages.append(completion.message)
        prompt, sampled, logprobs = (
            completion.prompt_ids or (),
            completion.completion_ids or (),
            completion.logprobs,
        )
        if not known:
            prompt, sampled, logprobs = (), (), logprobs and ()
        turns.append((turn, _TurnTokens(prompt[length:], sampled, logprobs)))
        length = len(prompt) + len(sampled)
    try:
        return Sample.from_turns(
            turns,
            reward=reward,
            example=episode.example.id,
            episode=episode.id,
            generation=episode.generation,
            branch=branch,
            agent=agent,
            messages=tuple(messages),
            tools=tuple(calls[-1].request.tools),
            notes={"drifted": False, **notes},
        )
    except ValueError as error:
        raise TrainingError(f"episode {episode.id!r}: {error}") from error


def step_returns(
    calls: Sequence[Call], events: Sequence[Event], reward: float, discount: float
) -> dict[int, float] | None:
    """Return the discounted return from each call on, by its index: step rewards, and `reward` at the end.

    A step reward belongs to the last of the calls before it. One given before the first call counts for no
    call. None if the agent gave no step rewards.
    """
    steps: dict[int, float] = {}
    for event in events:
        earlier = [call.index for call in calls if call.index <= event.after_call]
        if event.kind == "step_reward" and event.value is not None and earlier:
            steps[earlier[-1]] = steps.get(earlier[-1], 0.0) + event.value
    if not steps:
        return None
    steps[calls[-1].index] = steps.get(calls[-1].index, 0.0) + reward
    return discounted_returns(calls, steps, discount)


def discounted_returns(
    calls: Sequence[Call], step_rewards: Mapping[int, float], discount: float
) -> dict[int, float]:
    """Return the return of each call, by its index: `G[t] = r[t] + discount * G[t + 1]`.

    Sutton and Barto, Reinforcement Learning (2018), equation 3.9.
    """
    returns: dict[int, float] = {}
    following = 0.0
    for call in reversed(calls):
        following = step_rewards.get(call.index, 0.0) + discount * following
        returns[call.index] = following
    return returns


def make_pair(chosen: Sample, rejected: Sample) -> Pair | None:
    """Return the preference for one sample over another, or None without a difference to learn from.

    The responses begin where the tokens diverge. Over several turns a response is the whole rest of the
    conversation. The observations in it were not sampled and are masked (Rafailov et al., 2023). There is no
    difference if the sequences are equal, or if nothing was sampled after they diverge.
    """
    if not chosen.ids or not rejected.ids:
        differ = [*map(thinking_key, chosen.messages)] != [*map(thinking_key, rejected.messages)]
        return Pair(chosen, rejected) if differ else None
    start = shared_length(chosen.ids, rejected.ids)
    if not any(chosen.mask[start:]) or not any(rejected.mask[start:]):
        return None
    return Pair(chosen, rejected, start)


def same_prompt(a: Sample, b: Sample) -> bool:
    """Return whether both began with the same prompt, by tokens if both have them."""
    if a.ids and b.ids:
        return a.ids[: a.turns[0].start] == b.ids[: b.turns[0].start]
    prompts = (map(message_key, sample.messages[: sample.turns[0].message]) for sample in (a, b))
    first, second = map(list, prompts)
    return first == second


def require_tokens(episode: EpisodeRecord, calls: Sequence[Call], logprobs: bool) -> None:
    """Raise TrainingError unless every one of the calls has token ids (and logprobs)."""
    for call in calls:
        if call.logged:
            continue  # A backend tokenises its text.
        has_ids = _call_tokens(call) is not None
        has_logprobs = call.completion is not None and call.completion.logprobs is not None
        if not has_ids or (logprobs and not has_logprobs):
            missing = "logprobs" if has_ids else "token ids"
            raise TrainingError(
                f"episode {episode.id!r}, call {call.index}: the model {call.model!r} returned no {missing}, "
                "and the trainer adapter needs them. Use an engine that returns them (an OpenAI-compatible "
                "endpoint with 'logprobs: true' and 'return_token_ids: true'), or an adapter that takes text."
            )


@dataclass(frozen=True, slots=True)
class ScoredEpisode:
    """An episode with its reward and the calls to train on."""

    episode: EpisodeRecord
    reward: float
    calls: Sequence[Call]
    """Answered calls, in order."""
    reasoning: Any = None
    agent: str | None = None
    """The agent that reward and calls belong to, if an episode's agents are distinguished."""
    penalty: float = 0.0
    """The penalty per cut-off answer; `reward` already has it subtracted."""

    def samples(self, discount: float = 1.0, returns: Mapping[int, float] | None = None) -> list[Sample]:
        """Return the samples of its calls. Turns have `returns`, by the calls' indices. By default they have
        the step rewards' discounted returns, if the agent gave any."""
        courses: dict[frozenset[str | None], Mapping[int, float] | None] = {}
        made: list[Sample] = []
        for branch, (calls, fault) in enumerate(find_branches(self.calls)):
            own = frozenset((None, *(call.function for call in calls)))
            if returns is None and own not in courses:
                course = [call for call in self.calls if call.function in own]
                events = [event for event in self.episode.events if event.agent in own]
                courses[own] = step_returns(course, events, self.reward, discount)
            made.append(
                make_sample(
                    calls,
                    self.episode,
                    self.reward,
                    branch=branch,
                    returns=courses[own] if returns is None else returns,
                    agent=self.agent,
                    drifted=bool(fault),
                    reasoning=self.reasoning,
                )
            )
        return made


Group = Sequence[ScoredEpisode]
"""The scored episodes of one example."""


@dataclass(frozen=True, slots=True)
class UnitGroup:
    """The outcome of a group of episodes: samples to compare with each other, or pairs."""

    units: Sequence[SampleOrPair]
    rewards: Sequence[float] | None = None
    """The rewards of all the group's episodes, even of those without units. None: use the units' rewards."""

    @property
    def samples(self) -> list[Sample]:
        """The units that are not pairs."""
        return [unit for unit in self.units if isinstance(unit, Sample)]

    @classmethod
    def from_pairs(cls, pairs: Sequence[Pair]) -> Self:
        """Return pairs of answers, judged by the values of all their sides."""
        return cls(pairs, [sample.reward for pair in pairs for sample in pair.samples])


@dataclass(slots=True)
class Tally:
    """One epoch's counts that the run itself does not keep."""

    episodes: int = 0
    rewards: list[float] = field(default_factory=list)
    """The rewards of every scored episode, trained on or not."""
    unscored: int = 0
    """Episodes without a reward."""
    untargeted: int = 0
    """Scored episodes without a call to the target functions and model."""
    branches: int = 0
    drift: Counter[str] = field(default_factory=Counter)
    """Branches that began because a prompt repeated a conversation in other tokens, by what the template
    wrote differently: a message's role and kind, or the tools."""
    retried: int = 0
    """Unusable answers in a protocol that were asked for again. They are not trained on."""
    replacements: int = 0
    """Examples played to replace others in which no episode had an advantage."""
    left_out: Counter[str] = field(default_factory=Counter)
    """The counts of everything that the algorithm left out, by reason."""
    reward_groups: dict[str, int] = field(default_factory=dict)
    """Groups with several rewards (`compared`), and how many of them have no advantage (`flat`)."""

    def leave_out(self, reason: str, count: int) -> None:
        """Count what an algorithm leaves out. A reason with a count of 0 is not kept."""
        if count:
            self.left_out[reason] += count

    def facts(self) -> dict[str, Any]:
        """Return the counts as JSON."""
        counts = {"drift": dict(self.drift), "left_out": dict(self.left_out), "drifted": self.drift.total()}
        return asdict(self) | counts


def without_cut_off(group: UnitGroup, kind: Kind, tally: Tally) -> UnitGroup:
    """Return the group with cut-off answers masked out of its loss. A compared sample keeps its place in the
    group, so it counts in the mean. Other units are left out."""
    made: list[SampleOrPair] = []
    for unit in group.units:
        is_kept = [turn.finish_reason != "length" for sample in unit.samples for turn in sample.turns]
        if all(is_kept):
            made.append(unit)
        elif isinstance(unit, Sample) and kind == "samples" and unit.ids:
            made.append(unit.scale_weights(map(float, is_kept)))
    tally.leave_out(CUT_OFF, len(group.units) - len(made))
    return replace(group, units=made)


def is_play(episode: EpisodeRecord) -> bool:
    """Return whether the episode played a protocol."""
    output = episode.output
    return isinstance(output, Mapping) and {"protocol", "nodes", "bounds"} <= output.keys()


def read_tree(episode: EpisodeRecord) -> EpisodeTree:
    """Return the episode's tree. Raises RequestError if it played no protocol."""
    try:
        return EpisodeTree.from_json(episode.output)
    except RequestError as error:
        raise RequestError(f"episode {episode.id!r}: {error}") from None


def without_retries(episode: EpisodeRecord) -> EpisodeRecord:
    """Return the episode without unusable answers that were asked for again."""
    if not is_play(episode):
        return episode
    retried = {answer.call for node in read_tree(episode).nodes for answer in node.rejected}
    kept = tuple(call for call in episode.calls if call.index not in retried)
    return replace(episode, calls=kept) if len(kept) < len(episode.calls) else episode
