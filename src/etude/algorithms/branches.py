"""Branches: the calls of an episode that continue each other token for token.

Training never tokenises text again, so two calls belong to one sequence only when the prompt of the
later one starts with exactly the tokens of the earlier one: its prompt and what was sampled. Any other
call starts a branch of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from etude.core.call import Call, continues
from etude.core.episode import EpisodeRecord

EVERY_FUNCTION = "*"
"""Stands for all functions among the targeted ones."""


UNTOLD = "the engine does not tell"
"""In the place of a fault."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Calls that extend each other, in order; each has a completion."""

    index: int
    """Order within the episode, from 0."""
    calls: tuple[Call, ...]
    drifted: bool = False
    """Whether it began because a prompt repeated an earlier conversation in other tokens."""
    fault: str = ""
    """Which kind of message was other tokens then; of an engine that does not tell, that it does not."""

    @property
    def token_ids(self) -> tuple[int, ...] | None:
        """Prompt and completion of the last call: the whole sequence. None where tokens are unknown."""
        return sequence_of(self.calls[-1])


def branches_of(
    episode: EpisodeRecord, target_functions: Collection[str], target_model: str | None
) -> list[Branch]:
    """The branches of an episode, of calls by the functions (`*`: by any) to the model (None: to any)."""
    open_branches: list[list[Call]] = []
    faults: list[str] = []
    for call in episode.calls:
        if call.completion is None or not is_targeted(call, target_functions, target_model):
            continue
        extended = _branch_to_extend(open_branches, call)
        if extended is not None:
            extended.append(call)
            continue
        drifted = call.completion.drifted or any(_repeats(branch, call) for branch in open_branches)
        faults.append((call.completion.fault or UNTOLD) if drifted else "")
        open_branches.append([call])
    return [
        Branch(index, tuple(calls), bool(fault), fault)
        for index, (calls, fault) in enumerate(zip(open_branches, faults, strict=True))
    ]


def is_targeted(call: Call, target_functions: Collection[str], target_model: str | None) -> bool:
    """Whether a call was answered, by a model and for a function that are meant."""
    if call.completion is None or not ({call.function, EVERY_FUNCTION} & set(target_functions)):
        return False
    return target_model is None or call.model == target_model


def sequence_of(call: Call) -> tuple[int, ...] | None:
    """The tokens of a call, prompt and completion; None where the engine did not tell."""
    completion = call.completion
    if completion is None or completion.prompt_ids is None or completion.completion_ids is None:
        return None
    return completion.prompt_ids + completion.completion_ids


def _branch_to_extend(branches: Sequence[list[Call]], call: Call) -> list[Call] | None:
    """The branch with the longest sequence that the call extends."""
    fitting = [branch for branch in branches if _extends(branch[-1], call)]
    return max(
        fitting, key=lambda branch: len(sequence_of(branch[-1]) or branch[-1].request.messages), default=None
    )


def _extends(earlier: Call, call: Call) -> bool:
    """By tokens where both calls have them, otherwise by messages."""
    sequence = sequence_of(earlier)
    prompt = call.completion.prompt_ids if call.completion is not None else None
    if sequence is None or prompt is None:
        return continues(call.request.messages, earlier)
    return prompt[: len(sequence)] == sequence


def _repeats(branch: Sequence[Call], call: Call) -> bool:
    """Whether the call's messages continue any call of a branch that its tokens do not extend."""
    messages = call.request.messages
    return any(continues(messages, earlier) and not _extends(earlier, call) for earlier in branch)
