"""A training job, step by step, in one process or several: its data, news, checkpoints and memory."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from threading import Event
from typing import Literal, TypeAlias, TypeVar

from pydantic import BaseModel
from torch import OutOfMemoryError

from etude.algorithms.algorithm import Algorithm, read_groups
from etude.backends.state_folders import StateFolders
from etude.core.call import ChatRequest
from etude.core.conversion import Encoder, TrainingUnit
from etude.core.errors import EtudeError, RequestError, TrainingError, first_line
from etude.core.message import Message, Tool
from etude.core.sample import Pair, Sample, Unit, has_gradient, is_trained, trained_tokens
from etude.core.training_rows import DpoRow, GrpoRow, RowMessage, SupervisedRow, TrainingRow
from etude.learner.learner import Learner, TrainingCanceled
from etude.learner.objective import Objective
from etude.learner.optimiser import Step, plan_steps
from etude.models.device import available_memory, shown_bytes
from etude.models.policy import Policy
from etude.models.template import ChatTemplate
from etude.models.weights import load_tensors
from etude.store.files import WEIGHTS_FILE, delete_left_over


class TooLittleMemory(TrainingError):
    """A step would take more memory than is free."""


def training_error(error: RuntimeError) -> TrainingError:
    """Return a job's error for a torch error."""
    if isinstance(error, OutOfMemoryError):
        return TooLittleMemory(
            f"memory ran out: {first_line(error)}; lower token_budget or batch_size, set "
            "gradient_checkpointing, or train LoRA weights"
        )
    return TrainingError(f"training failed: {error}")


def require_room(learner: Learner) -> None:
    """Raise TooLittleMemory if gradients and AdamW's moments take more memory than is free.

    Processes on one machine or GPU add up their needs. All processes of a team must call this together.
    """
    team, device = learner.team, next(learner.policy.model.parameters()).device
    place, free = f"{platform.node()}/{device}", available_memory(str(device))
    needed = int(team.sum({place: learner.optimiser.bytes_to_come})[place])
    is_short = free is not None and needed > free
    if not team.any(is_short):
        return
    if free is not None and is_short:
        raise TooLittleMemory(
            f"gradients and the optimiser's state take {shown_bytes(needed)} of memory beside the weights, "
            f"and {shown_bytes(free)} are free on {device} of {platform.node()}; train LoRA weights, or free "
            "some memory"
        )
    raise TooLittleMemory("another process of the job has too little memory")


Row: TypeAlias = Sequence[Unit]
"""Units that must be in one optimiser step: all units of one line of a file, or a single unit."""


class Interrupted(Exception):
    """The job was asked to stop, and resumes from its checkpoint later."""


class News(BaseModel, frozen=True):
    """A report about a job. `ended` is about its processes, which ended early; `done` and `failed` end it.

    `went_back` says that the job goes on after an earlier `step`, because later checkpoints are damaged.
    """

    kind: Literal["started", "stepped", "went_back", "ended", "done", "failed"]
    step: int = 0
    """The step that was taken, or after which the job starts or goes on."""
    of: int = 0
    epoch: int = 0
    metrics: dict[str, float] = {}
    message: str = ""
    """The damage, the cause of an end or failure, or a note for the user."""
    code: str = ""
    """The kind of failure."""
    digest: str = ""
    """Hash of the new weights."""
    trained_tokens: int = 0

    @property
    def is_end(self) -> bool:
        """Whether the job has ended."""
        return self.kind in ("done", "failed")

    @property
    def goes_on(self) -> str:
        """Where the job goes on, in words."""
        return f"continues from step {self.step}" if self.step else "begins anew"


Tell: TypeAlias = Callable[[News], None]
"""Takes the news of a job. Only the leader of a team calls it."""


@dataclass(frozen=True, slots=True)
class JobData:
    """The data of a job, with their order in training."""

    objective: Objective
    rows: Sequence[Row]
    validation: Sequence[Row] = ()
    """Rows whose loss is measured at the end of every epoch."""
    passes: int = 1
    batch_size: int | None = None
    """Rows per optimiser step. None takes all at once."""
    seed: int = 0
    key: tuple[str | int, ...] = ()
    """Separates this job's shuffling from other jobs with the same seed."""

    def plan(self) -> list[Step]:
        """Return the steps of the job. Raises TrainingError if there is nothing to learn from."""
        counts = has_gradient if self.objective.skips_idle else is_trained
        if not any(map(counts, chain.from_iterable(self.rows))):
            raise TrainingError(
                "there is nothing to learn from: no token has both a weight and an advantage, for "
                "example because all rewards of a group are equal"
            )
        live = [any(map(counts, row)) for row in self.rows]
        return plan_steps(live, self.passes, self.batch_size, self.seed, *self.key)

    def units(self, step: Step) -> list[Unit]:
        """Return the units of a step, except those without a trained token."""
        return [unit for row in step.rows for unit in self.rows[row] if is_trained(unit)]

    def measure(self, step: Step, learner: Learner) -> dict[str, float]:
        """Return further metrics after a step: `valid_loss` at the end of an epoch."""
        if not (self.validation and step.ends_epoch):
            return {}
        return {
            "valid_loss": learner.evaluate([*chain.from_iterable(self.validation)], self.objective)["loss"]
        }

    def count_trained_tokens(self, training: JobTraining) -> int:
        """Return the number of trained tokens of all steps."""
        return sum(trained_tokens(self.rows[row]) for step in training.steps for row in step.rows)


class JobTraining:
    """One job's training, step by step. It can stop and resume after each step.

    Every process of the learner's team has one. Only the leader writes and tells.
    """

    def __init__(
        self,
        learner: Learner,
        data: JobData,
        tell: Tell,
        checkpoints: StateFolders | None = None,
        checkpoint_steps: int = 1,
    ) -> None:
        """Plan the job, and load its newest undamaged checkpoint.

        A checkpoint follows every `checkpoint_steps` steps, except the last step, whose weights the caller
        keeps. Raises TrainingError if there is nothing to learn from, StoreError for a checkpoint that does
        not fit.
        """
        self._learner = learner
        self._team = learner.team
        self._data = data
        self._tell = tell
        self._checkpoints = checkpoints
        self._checkpoint_steps = checkpoint_steps
        self.steps = data.plan()
        self.history: list[dict[str, float]] = []
        """The metrics of the taken steps."""
        learner.begin_training(
            [*chain.from_iterable(data.rows)] if len(self.steps) > 1 else (), data.objective
        )
        if checkpoints is None:
            return
        newest, damage = 0, list[str]()
        for number in reversed(checkpoints.numbers()):
            if not (clauses := checkpoints.damage(number)):
                newest = number
                break
            damage += clauses
        # Waits until all processes have looked, before the leader changes anything.
        self._team.any(bool(damage))
        if self._team.leads:
            delete_left_over(checkpoints.root)
            if damage:
                checkpoints.prune([number for number in checkpoints.numbers() if number <= newest])
                tell(News(kind="went_back", step=newest, message="; ".join(damage)))
        if newest:
            folder = checkpoints.folder(newest)
            learner.policy.load_tensors(load_tensors(folder / WEIGHTS_FILE))
            learner.restore(folder)
            self.history = checkpoints.facts(newest)["metrics"]

    def run(self, canceled: Event, stopping: Event | None = None) -> dict[str, float]:
        """Take the remaining steps. Return the mean metrics of all steps.

        `mismatch_kl` is `sampled_kl` before the first change. It compares the learner with the engine if the
        engine sampled from the same weights.

        The weights in memory change meanwhile. After an error they are between two versions. Raises
        TrainingCanceled when `canceled` is set. Raises Interrupted, after a checkpoint, when `stopping` is
        set. Raises TooLittleMemory before the first step if the optimiser's state does not fit.
        """
        require_room(self._learner)
        if self._team.leads:
            self._tell(News(kind="started", step=len(self.history)))
        for step in self.steps[len(self.history) :]:
            metrics = self._take(step, canceled)
            self.history.append(metrics)
            if self._team.leads:
                finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
                facts = {"step": step.number, "of": step.of, "epoch": step.epoch, "metrics": finite}
                self._tell(News(kind="stepped", **facts))
            interrupted = self._team.any(stopping is not None and stopping.is_set())
            is_due = step.number % self._checkpoint_steps == 0 and step.number < step.of
            if self._checkpoints is not None and (interrupted or is_due):
                state = self._learner.snapshot()
                if self._team.leads:
                    self._checkpoints.write(step.number, {"metrics": self.history}, state)
                    # The previous checkpoint stays too, to resume from if this one is damaged.
                    self._checkpoints.prune(self._checkpoints.numbers()[-2:])
            if interrupted:
                raise Interrupted
        self._learner.end_training()
        names = sorted({name for metrics in self.history for name in metrics})
        count, first = len(self.history), self.history[0].get("sampled_kl")
        means = {name: sum(metrics.get(name, 0.0) for metrics in self.history) / count for name in names}
        return means if first is None else {**means, "mismatch_kl": first}

    def _take(self, step: Step, canceled: Event) -> dict[str, float]:
        try:
            units = self._data.units(step)
            metrics = self._learner.take_step(units, self._data.objective, step.part, canceled)
            return metrics | self._data.measure(step, self._learner)
        except TrainingCanceled as error:
            raise TrainingCanceled(f"canceled after {step.number - 1} of {step.of} steps") from error


def units_of_groups(
    groups: Iterable[Sequence[TrainingUnit]], algorithm: Algorithm, template: ChatTemplate
) -> list[list[Sample | Pair]]:
    """Return the samples or pairs of a collection's groups. Raises TrainingError for unusable data."""

    def prompt(messages: Sequence[Message]) -> tuple[int, ...]:
        return template.prompt(ChatRequest(tuple(messages))).ids

    encoder = Encoder(prompt, template.completion_ids, template.transcript)
    return read_groups(groups, algorithm, encoder)


def units_of_rows(
    rows: Iterable[SupervisedRow | DpoRow | GrpoRow], policy: Policy, algorithm: Algorithm
) -> list[Row]:
    """Return the units of each row of a training file: one, or a group.

    Raises TrainingError with the number of a row that does not fit the model.
    """
    vocabulary = policy.model.get_input_embeddings().num_embeddings
    groups: list[list[Sample | Pair]] = []
    for number, row in enumerate(rows, start=1):
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
            raise TrainingError(f"row {number}: {error}") from error
    units = iter(algorithm.units(groups))
    return [tuple(next(units) for _ in group) for group in groups]


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
