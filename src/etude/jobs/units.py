"""A job's data and hyperparameters as the learner takes them: units, and the objective of the method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from etude.core.call import ChatRequest
from etude.core.errors import EtudeError, TrainingError
from etude.core.message import Message, OpenAIMessage, Tool
from etude.core.training_rows import DpoRow, GrpoRow, RowMessage, SupervisedRow
from etude.core.trajectory import Method, TrajectoryCollection
from etude.jobs.training import Row
from etude.learner.batch import TokenSequence, TrainingBatch
from etude.learner.collate import dpo_batch, grpo_batch, supervised_batch
from etude.learner.dpo import Dpo
from etude.learner.grpo import Grpo
from etude.learner.objective import Objective
from etude.learner.sft import Sft
from etude.models.policy import Policy
from etude.models.template import ChatTemplate


def objective_of(method: Method, options: Mapping[str, Any]) -> Objective:
    """The objective of a method with its options, by name.

    DPO's reference is the model that a job starts from, unless the options say otherwise.
    """
    match method:
        case "supervised":
            return Sft()
        case "dpo":
            reference = options.get("reference", "base")
            return Dpo(options["beta"], options["label_smoothing"], options["loss"], reference)
        case "grpo":
            return Grpo(**{field.name: options[field.name] for field in fields(Grpo)})


def units_of_collection(
    collection: TrajectoryCollection, options: Mapping[str, Any], template: ChatTemplate
) -> TrainingBatch:
    """The units of a collection. Raises TrainingError for what cannot be trained on."""

    def tokenise(prompt: list[OpenAIMessage] | str, response: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        messages = [OpenAIMessage(role="user", content=prompt)] if isinstance(prompt, str) else prompt
        request = ChatRequest(tuple(message.to_wire() for message in messages))
        return template.prompt(request).ids, template.completion_ids(response)

    match collection.method:
        case "grpo":
            return grpo_batch(collection, options["advantage_scale"])
        case "dpo":
            return dpo_batch(collection, tokenise, needs_logprobs=options["reference"] == "sampler")
        case "supervised":
            return supervised_batch(collection, template.completion_ids)


def units_of_rows(
    rows: Iterable[SupervisedRow | DpoRow | GrpoRow], policy: Policy, options: Mapping[str, Any]
) -> list[Row]:
    """The units of each row of a training file: one, or for a group of grpo one for each trajectory.

    Raises TrainingError with the number of a row that does not fit the model.
    """
    found = []
    for number, row in enumerate(rows, start=1):
        try:
            units = _units(row, policy, options)
        except EtudeError as error:
            raise TrainingError(f"row {number}: {error}") from error
        for sequence in (sequence for unit in units for sequence in unit):
            _check(sequence, policy, f"row {number}")
        found.append(units)
    return found


def _units(row: SupervisedRow | DpoRow | GrpoRow, policy: Policy, options: Mapping[str, Any]) -> Row:
    if isinstance(row, SupervisedRow):
        return ((_transcript(policy, row.messages, row.tools or ()),),)
    if isinstance(row, DpoRow):
        # The assistant's messages in the prompt are context of both answers.
        prompt = [
            message.model_copy(update={"weight": 0}) if message.role == "assistant" else message
            for message in row.input.messages
        ]
        tools = row.input.tools or ()
        chosen = _transcript(policy, [*prompt, *row.preferred_output], tools)
        return ((chosen, _transcript(policy, [*prompt, *row.non_preferred_output], tools)),)
    collection = TrajectoryCollection(trajectories=[row.group()], run_id="job", method="grpo")
    return grpo_batch(collection, options["advantage_scale"]).units


def _transcript(policy: Policy, messages: Sequence[RowMessage], tools: Sequence[Tool]) -> TokenSequence:
    wire: list[Message] = [message.to_wire() for message in messages]
    ids, sampled = policy.template.transcript(wire, tools)
    weights = tuple(map(float, sampled))
    return TokenSequence(ids, weights, weights, (0.0,) * len(ids))


def _check(sequence: TokenSequence, policy: Policy, where: str) -> None:
    if len(sequence.ids) > policy.max_context:
        raise TrainingError(
            f"{where} has {len(sequence.ids)} tokens, and the model's context ends at {policy.max_context}; "
            "shorten it or leave it out"
        )
    vocabulary = policy.model.get_input_embeddings().num_embeddings
    if max(sequence.ids, default=0) >= vocabulary:
        raise TrainingError(
            f"{where} has token id {max(sequence.ids)}, and the model's vocabulary {vocabulary}; "
            "was it sampled from another model?"
        )
