"""The rows of training files as units: samples, pairs, or groups of samples."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TypeVar

from etude.algorithms.algorithm import Algorithm
from etude.backends.job_training import Row
from etude.core.errors import EtudeError, RequestError, TrainingError
from etude.core.message import Message, Tool
from etude.core.sample import Pair, Sample
from etude.core.training_rows import DpoRow, GrpoRow, RowMessage, SupervisedRow, TrainingRow
from etude.models.policy import Policy
from etude.models.template import ChatTemplate


def units_of_rows(rows: Iterable[tuple[str, TrainingRow]], policy: Policy, algorithm: Algorithm) -> list[Row]:
    """Return the units of each row of a training file: one, or a group. Each row comes after its place.

    Raises TrainingError with the place of a row that does not fit the model.
    """
    vocabulary = policy.model.get_input_embeddings().num_embeddings
    groups: list[list[Sample | Pair]] = []
    for place, row in rows:
        try:
            groups.append(units_of_row(row, policy.template))
            for sample in chain.from_iterable(unit.samples for unit in groups[-1]):
                if len(sample.ids) > policy.max_context:
                    raise TrainingError(
                        f"it has {len(sample.ids)} tokens, and the model's context ends at "
                        f"{policy.max_context}; shorten it or leave it out"
                    )
                if max(sample.ids, default=0) >= vocabulary:
                    raise TrainingError(
                        f"it has token id {max(sample.ids)}, and the model's vocabulary {vocabulary}; was it "
                        "sampled from another model?"
                    )
        except EtudeError as error:
            raise TrainingError(f"{place}: {error}") from error
    units = iter(algorithm.units(groups))
    return [tuple(next(units) for _ in group) for group in groups]


W = TypeVar("W")
Write = Callable[[Sequence[Message], Sequence[Tool]], W]
"""Converts a finished conversation. Raises RequestError if the template cannot write it."""


def require_written(row: TrainingRow, template: ChatTemplate) -> None:
    """Raise RequestError or ImpossibleCall if the chat template cannot write the row as it stands."""
    if not isinstance(row, GrpoRow):
        _conversations(row, template.require_written)


def units_of_row(row: TrainingRow, template: ChatTemplate) -> list[Sample | Pair]:
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
