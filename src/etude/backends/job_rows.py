"""Training-file rows as token sequences, for checks at upload and for training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from etude.core.errors import RequestError, TrainingError
from etude.core.message import Message, Tool
from etude.core.sample import Pair, Sample
from etude.core.training_rows import DpoRow, GrpoRow, RowMessage, SupervisedRow, TrainingRow
from etude.models.template import ChatTemplate

W = TypeVar("W")
Write = Callable[[Sequence[Message], Sequence[Tool]], W]
"""Converts a finished conversation. Raises RequestError if the template cannot write it."""


def require_written(row: TrainingRow, template: ChatTemplate) -> None:
    """Raise RequestError or ImpossibleCall if the chat template cannot write the row as it stands."""
    if not isinstance(row, GrpoRow):
        _conversations(row, template.require_written)


def units_of_row(row: SupervisedRow | DpoRow | GrpoRow, template: ChatTemplate) -> list[Sample | Pair]:
    """Return the samples or the pair of a row. Raises as `require_written`."""
    if isinstance(row, GrpoRow):
        return [*row.group()]
    samples = [
        Sample(ids, tuple(map(bool, sampled))) for ids, sampled in _conversations(row, template.transcript)
    ]
    if isinstance(row, SupervisedRow):
        return [*samples]
    chosen, rejected = samples
    return [Pair(chosen, rejected)]


def require_fits(unit: Sample | Pair, max_context: int, vocabulary: int) -> None:
    """Raise TrainingError if a sequence exceeds the context or has a token outside the vocabulary."""
    for sample in unit.samples:
        if len(sample.ids) > max_context:
            raise TrainingError(
                f"it has {len(sample.ids)} tokens, and the model's context ends at {max_context}; shorten it "
                "or leave it out"
            )
        if max(sample.ids, default=0) >= vocabulary:
            raise TrainingError(
                f"it has token id {max(sample.ids)}, and the model's vocabulary {vocabulary}; was it sampled "
                "from another model?"
            )


def _conversations(row: SupervisedRow | DpoRow, write: Write[W]) -> list[W]:
    """Write each conversation that a row is learned as. A pair has two, with one answer each.

    Some templates write earlier messages differently later, for example without their thinking. Then each
    answer has its own conversation, so that it is learned once, after the context that the model sees.
    """
    if isinstance(row, DpoRow):
        # The prompt's assistant messages are context for both answers.
        prompt, tools = _as_context(row.input.messages), row.input.tools or ()
        answers = (row.preferred_output, row.non_preferred_output)
        return [write(_wire([*prompt, *answer]), tools) for answer in answers]
    messages, tools = row.messages, row.tools or ()
    learned = [index for index, each in enumerate(messages) if each.role == "assistant" and each.weight != 0]
    try:
        return [write(_wire(messages), tools)]
    except RequestError:
        if len(learned) < 2:
            raise
        return [write(_wire([*_as_context(messages[:index]), messages[index]]), tools) for index in learned]


def _as_context(messages: Sequence[RowMessage]) -> list[RowMessage]:
    """Return the messages with none to be learned."""
    return [
        message.model_copy(update={"weight": 0}) if message.role == "assistant" else message
        for message in messages
    ]


def _wire(messages: Sequence[RowMessage]) -> list[Message]:
    return [message.to_wire() for message in messages]
