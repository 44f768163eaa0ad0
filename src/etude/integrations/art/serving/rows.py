"""ART's trajectories as rows of the method `grpo`: token ids, as they were sampled.

A choice tells the tokens that were sampled. What stood before them is rendered by the model's chat
template, as this server rendered it when it was asked. Where that does not extend the tokens before, it
is a branch of its own: nothing that was sampled is ever tokenised again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import ValidationError

from etude.core.call import ChatRequest
from etude.core.errors import EngineError, RequestError
from etude.core.message import Message
from etude.core.training_rows import GrpoRow, GrpoTrajectory, GrpoTurn
from etude.integrations.art.serving.bodies import ArtChoice, ArtGroup, ArtHistory, ArtTrajectory, ChoiceToken
from etude.models.speech import Speech
from etude.wire.bodies import check_conversation
from etude.wire.http_server import ApiError
from etude.wire.sampling import problems_of

_NAMED = "token_id:"


@dataclass(frozen=True, slots=True)
class ArtRows:
    """The rows of a job, and the counts that its client gets, under ART's names where it has them."""

    rows: list[GrpoRow]
    counts: dict[str, float]


@dataclass(slots=True)
class _Branch:
    """Turns whose tokens extend each other."""

    ids: tuple[int, ...] = ()
    turns: list[GrpoTurn] = field(default_factory=list)


def rows_of(groups: Sequence[ArtGroup], speech: Speech) -> ArtRows:
    """The rows of the groups whose rewards differ. Raises ApiError that names the place of what is wrong."""
    counts: Counter[str] = Counter(drifted_prompts=0, found_tokens=0, trajectories_without_logprobs=0)
    rows = []
    for index, group in enumerate(groups):
        if not group.is_trainable:
            continue
        trajectories = []
        for number, trajectory in enumerate(group.trajectories):
            where = f"trajectory_groups[{index}].trajectories[{number}]"
            made = _Trajectory(speech, counts, where).rows(trajectory, str(number))
            counts["trajectories_without_logprobs"] += not made
            trajectories += made
        if len({each.reward for each in trajectories}) > 1:
            rows.append(GrpoRow(trajectories=tuple(trajectories)))
    totals = {
        "scenarios": len(groups),
        "trajectories": sum(len(group.trajectories) + len(group.exceptions) for group in groups),
        "groups_submitted": len(groups),
        "groups_trainable": len(rows),
        **counts,
    }
    return ArtRows(rows, {f"data/step_num_{name}": float(value) for name, value in totals.items()})


class _Trajectory:
    """One trajectory on its way."""

    def __init__(self, speech: Speech, counts: Counter[str], where: str) -> None:
        self._speech = speech
        self._counts = counts
        self._where = where

    def rows(self, trajectory: ArtTrajectory, episode: str) -> list[GrpoTrajectory]:
        """A row for each history and branch; none where no choice has logprobs."""
        branches = []
        for number, history in enumerate(trajectory.histories):
            inside = f"{self._where}.additional_histories[{number - 1}]" if number else self._where
            branches += self._branches(history, inside)
        return [
            GrpoTrajectory(turns=tuple(branch.turns), reward=trajectory.reward, episode=episode)
            for branch in branches
        ]

    def _branches(self, history: ArtHistory, inside: str) -> list[_Branch]:
        branches: list[_Branch] = []
        messages: list[Message] = []
        for number, message in enumerate(history.messages_and_choices):
            where = f"{inside}.messages_and_choices[{number}]"
            if "finish_reason" not in message:
                messages.append(message)
                continue
            choice = _choice(message, where)
            if choice.tokens:
                self._add(branches, self._prompt(messages, history, where), choice, where)
            messages.append(choice.as_message)
        return branches

    def _add(self, branches: list[_Branch], prompt: tuple[int, ...], choice: ArtChoice, where: str) -> None:
        """A turn: of the branch that its prompt extends, or of a new one."""
        branch = branches[-1] if branches else None
        if branch is None or prompt[: len(branch.ids)] != branch.ids:
            self._counts["drifted_prompts"] += branch is not None
            branch = _Branch()
            branches.append(branch)
        sampled = tuple(self._id(token, where) for token in choice.tokens)
        context = prompt[len(branch.ids) :]
        branch.ids = prompt + sampled
        if len(branch.ids) > self._speech.max_context:
            raise _wrong(
                where,
                f"{len(branch.ids)} tokens up to here, and the model's context ends at "
                f"{self._speech.max_context}",
            )
        logprobs = tuple(token.logprob for token in choice.tokens)
        branch.turns.append(GrpoTurn(context_ids=context, token_ids=sampled, logprobs=logprobs))

    def _prompt(self, messages: list[Message], history: ArtHistory, where: str) -> tuple[int, ...]:
        try:
            check_conversation(messages, history.tools)
            request = ChatRequest(tuple(messages), tuple(history.tools or ()))
            return self._speech.template.prompt(request).ids
        except (RequestError, EngineError) as error:
            raise _wrong(where, f"what stands before it is no prompt: {error}") from error

    def _id(self, token: ChoiceToken, where: str) -> int:
        """A sampled token, named `token_id:7` or by its text."""
        name = token.token
        if name.startswith(_NAMED) and name[len(_NAMED) :].isdecimal():
            token_id = int(name[len(_NAMED) :])
            if token_id < self._speech.vocabulary:
                return token_id
            raise _wrong(where, f"{name} is not in the vocabulary of {self._speech.vocabulary}")
        ids: list[int] = self._speech.tokenizer(name, add_special_tokens=False)["input_ids"]
        if len(ids) != 1 or self._speech.template.decode(ids) != name:
            raise _wrong(
                where,
                f"the token {name!r} is named by a text that is not one token; ask for the answer under the "
                "model's ART name, or with return_tokens_as_token_ids",
            )
        self._counts["found_tokens"] += 1
        return ids[0]


def _choice(wire: Message, where: str) -> ArtChoice:
    try:
        return ArtChoice.model_validate(wire)
    except ValidationError as error:
        message, _ = problems_of(error.errors(include_url=False, include_input=False))
        raise _wrong(where, message) from error


def _wrong(where: str, message: str) -> ApiError:
    return ApiError(400, f"{where}: {message}", param=where, code="invalid_value")
