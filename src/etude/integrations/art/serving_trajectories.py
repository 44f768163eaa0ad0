"""ART's trajectories as rows of the method `grpo`: token ids, as they were sampled.

A choice tells the tokens that were sampled. What stood before them is rendered by the model's chat
template, as this server rendered it when it was asked. Where that does not extend the tokens before, it
is a branch of its own: nothing that was sampled is ever tokenised again.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from etude.core.call import ChatRequest
from etude.core.errors import EngineError, RequestError
from etude.core.message import Message, Tool
from etude.core.training_rows import GrpoRow, GrpoTrajectory, GrpoTurn
from etude.models.speech import Speech
from etude.wire.bodies import check_conversation
from etude.wire.http_server import ApiError
from etude.wire.sampling import problems_of


class ArtHistory(BaseModel):
    """ART's `History`: messages, and among them the choices that the model sampled."""

    messages_and_choices: list[dict[str, Any]] = Field(default_factory=list)
    tools: list[Tool] | None = None


class ArtTrajectory(ArtHistory):
    """ART's `Trajectory`."""

    additional_histories: list[ArtHistory] = Field(default_factory=list)
    reward: FiniteFloat = 0.0


class ArtGroup(BaseModel):
    """ART's `TrajectoryGroup`."""

    trajectories: list[ArtTrajectory] = Field(default_factory=list)


class ChoiceToken(BaseModel):
    """A sampled token in a choice's logprobs, named `token_id:7`."""

    token: str
    logprob: FiniteFloat


class ChoiceLogprobs(BaseModel):
    """The logprobs of a choice."""

    content: list[ChoiceToken] | None = None
    refusal: list[ChoiceToken] | None = None


class ArtChoice(BaseModel):
    """OpenAI's `Choice`: what marks it among messages is its `finish_reason`."""

    message: Message
    logprobs: ChoiceLogprobs | None = None


@dataclass(slots=True)
class _Branch:
    """Turns whose tokens extend each other."""

    ids: tuple[int, ...] = ()
    turns: list[GrpoTurn] = field(default_factory=list)


def rows_of(groups: Sequence[ArtGroup], speech: Speech) -> tuple[list[GrpoRow], Counter[str]]:
    """The rows of the groups whose rewards differ, and counts of what was found in them.

    Raises ApiError that names the place of what is wrong.
    """
    counts: Counter[str] = Counter(drifted_prompts=0, trajectories_without_logprobs=0)
    rows = []
    for index, group in enumerate(groups):
        if len({trajectory.reward for trajectory in group.trajectories}) < 2:
            continue
        trajectories = []
        for number, trajectory in enumerate(group.trajectories):
            where, branches = f"trajectory_groups[{index}].trajectories[{number}]", list[_Branch]()
            for inside, history in enumerate([trajectory, *trajectory.additional_histories]):
                place = f"{where}.additional_histories[{inside - 1}]" if inside else where
                branches += _branches(history, speech, counts, place)
            counts["trajectories_without_logprobs"] += not branches
            trajectories += [
                GrpoTrajectory(turns=tuple(branch.turns), reward=trajectory.reward, episode=str(number))
                for branch in branches
            ]
        if len({each.reward for each in trajectories}) > 1:
            rows.append(GrpoRow(trajectories=tuple(trajectories)))
    return rows, counts


def _branches(history: ArtHistory, speech: Speech, counts: Counter[str], inside: str) -> list[_Branch]:
    """Those of a history; none where no choice has logprobs."""
    branches: list[_Branch] = []
    messages: list[Message] = []
    for number, message in enumerate(history.messages_and_choices):
        if "finish_reason" not in message:
            messages.append(message)
            continue
        where = f"{inside}.messages_and_choices[{number}]"
        try:
            choice = ArtChoice.model_validate(message)
        except ValidationError as error:
            raise _wrong(
                where, problems_of(error.errors(include_url=False, include_input=False))[0]
            ) from error
        if choice.logprobs is not None and (tokens := choice.logprobs.content or choice.logprobs.refusal):
            prompt = _prompt(messages, history, speech, where)
            branch = branches[-1] if branches else None
            if branch is None or prompt[: len(branch.ids)] != branch.ids:
                counts["drifted_prompts"] += branch is not None
                branch = _Branch()
                branches.append(branch)
            sampled, context = tuple(_id(token, speech, where) for token in tokens), prompt[len(branch.ids) :]
            branch.ids = prompt + sampled
            if len(branch.ids) > speech.max_context:
                end = speech.max_context
                raise _wrong(where, f"{len(branch.ids)} tokens up to here, and the context ends at {end}")
            logprobs = tuple(token.logprob for token in tokens)
            branch.turns.append(GrpoTurn(context_ids=context, token_ids=sampled, logprobs=logprobs))
        # As a client would send it back.
        kept = {key: value for key, value in choice.message.items() if value is not None}
        messages.append({"content": "", **kept, "role": "assistant"})
    return branches


def _prompt(messages: list[Message], history: ArtHistory, speech: Speech, where: str) -> tuple[int, ...]:
    try:
        check_conversation(messages, history.tools)
        return speech.template.prompt(ChatRequest(tuple(messages), tuple(history.tools or ()))).ids
    except (RequestError, EngineError) as error:
        raise _wrong(where, f"what stands before it is no prompt: {error}") from error


def _id(token: ChoiceToken, speech: Speech, where: str) -> int:
    name = token.token.removeprefix("token_id:")
    if name == token.token or not name.isdecimal():
        raise _wrong(
            where,
            f"the token {name!r} is named by its text, and not `token_id:…`; ask for the answer under the "
            "model's ART name, or with return_tokens_as_token_ids",
        )
    if int(name) >= speech.vocabulary:
        raise _wrong(where, f"token_id:{name} is not in the vocabulary of {speech.vocabulary}")
    return int(name)


def _wrong(where: str, message: str) -> ApiError:
    return ApiError(400, f"{where}: {message}", param=where, code="invalid_value")
