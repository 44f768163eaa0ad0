"""A job's data as the learner takes them: the samples or pairs of a collection, or of a training file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from etude.algorithms.algorithm import Algorithm, groups_of
from etude.core.call import ChatRequest
from etude.core.edge import Encoder
from etude.core.errors import EtudeError, TrainingError
from etude.core.message import Message, OpenAIMessage, Tool
from etude.core.sample import Pair, Sample, SampleOrPair
from etude.core.training_rows import DpoRow, GrpoRow, RowMessage, SupervisedRow
from etude.core.trajectory import TrajectoryCollection
from etude.jobs.training import Row
from etude.models.policy import Policy
from etude.models.template import ChatTemplate


def units_of_collection(
    collection: TrajectoryCollection, algorithm: Algorithm, template: ChatTemplate
) -> list[list[SampleOrPair]]:
    """The collection's samples or pairs, by group. Raises TrainingError for what cannot be trained on."""

    def prompt(messages: list[OpenAIMessage] | str) -> tuple[int, ...]:
        chat = [OpenAIMessage(role="user", content=messages)] if isinstance(messages, str) else messages
        return template.prompt(ChatRequest(tuple(message.to_wire() for message in chat))).ids

    return groups_of(collection, algorithm, Encoder(prompt, template.completion_ids))


def units_of_rows(
    rows: Iterable[SupervisedRow | DpoRow | GrpoRow], policy: Policy, algorithm: Algorithm
) -> list[Row]:
    """The units of each row of a training file: one, or those of a group.

    Raises TrainingError with the number of a row that does not fit the model.
    """
    groups: list[list[SampleOrPair]] = []
    for number, row in enumerate(rows, start=1):
        try:
            groups.append([*row.group()] if isinstance(row, GrpoRow) else [_unit_of(row, policy)])
        except EtudeError as error:
            raise TrainingError(f"row {number}: {error}") from error
        for sample in (sample for unit in groups[-1] for sample in unit.samples):
            _check(sample, policy, f"row {number}")
    units = iter(algorithm.units(groups)[0])
    return [tuple(next(units) for _ in group) for group in groups]


def _unit_of(row: SupervisedRow | DpoRow, policy: Policy) -> SampleOrPair:
    if isinstance(row, SupervisedRow):
        return _transcript(policy, row.messages, row.tools or ())
    # The assistant's messages in the prompt are context of both answers.
    prompt = [
        message.model_copy(update={"weight": 0}) if message.role == "assistant" else message
        for message in row.input.messages
    ]
    tools = row.input.tools or ()
    chosen = _transcript(policy, [*prompt, *row.preferred_output], tools)
    return Pair(chosen, _transcript(policy, [*prompt, *row.non_preferred_output], tools))


def _transcript(policy: Policy, messages: Sequence[RowMessage], tools: Sequence[Tool]) -> Sample:
    wire: list[Message] = [message.to_wire() for message in messages]
    ids, sampled = policy.template.transcript(wire, tools)
    return Sample(ids, tuple(map(bool, sampled)))


def _check(sample: Sample, policy: Policy, where: str) -> None:
    if len(sample.ids) > policy.max_context:
        raise TrainingError(
            f"{where} has {len(sample.ids)} tokens, and the model's context ends at {policy.max_context}; "
            "shorten it or leave it out"
        )
    vocabulary = policy.model.get_input_embeddings().num_embeddings
    if max(sample.ids, default=0) >= vocabulary:
        raise TrainingError(
            f"{where} has token id {max(sample.ids)}, and the model's vocabulary {vocabulary}; "
            "was it sampled from another model?"
        )
