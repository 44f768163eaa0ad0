"""The interfaces of the parts of a run, as other parts meet them."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from etude.core.call import ChatRequest, Completion
from etude.core.episode import EpisodeRecord, Example
from etude.core.evaluation import EvalInputItem, EvalOutputItem
from etude.core.job import ModelVersion
from etude.core.stats import Bounds


class Engine(Protocol):
    """Samples completions from one model, and adopts new versions of it.

    Engines batch concurrent requests themselves; callers just call `complete` many times at once.
    """

    @property
    def version(self) -> int:
        """Number of the model version that the next request will be sampled from."""

    async def complete(self, request: ChatRequest) -> Completion:
        """Sample one assistant message.

        Raises EngineError when there is none to be had: retries are spent, the prompt does not fit,
        the endpoint refused. Cancelling the call frees what it held.
        """

    async def adopt(self, version: ModelVersion) -> None:
        """Sample from `version` from now on. Adopting the current version again does nothing.

        Raises EngineError when the weights cannot be loaded or their digest differs.
        """

    async def close(self) -> None:
        """Free threads, sockets and memory. Calling it twice is fine."""


def bare(engine: Engine) -> Engine:
    """The engine that somebody wrote, without those around it that count its calls."""
    while (inner := getattr(engine, "metered", None)) is not None:
        engine = inner
    return engine


def end_conversation(engine: Engine, conversation: str) -> None:
    """Have an engine let go of what it keeps of a conversation, if anything: no call of it follows."""
    # Not by a protocol: asking whether an object has one takes a while.
    end = getattr(bare(engine), "end_conversation", None)
    if end is not None:
        end(conversation)


@runtime_checkable
class Portable(Protocol):
    """An engine that only speaks to an address: other processes can build it too, and adopt its versions."""

    adopted: ModelVersion | None
    """The version that was adopted last; None before the first."""


class Evaluator(ABC):
    """Scores episodes. Subclasses that compare the episodes of an example override `evaluate_group` too."""

    timeout: float | None = None
    """Seconds that one evaluation may take; None leaves it to the evaluation run."""
    bounds: Bounds | None = None
    """The least and the most that it can give; None where it does not say. A score outside is none."""

    @property
    def is_relative(self) -> bool:
        """Whether a score depends on the example's other episodes, so that they must be scored together."""
        return type(self).evaluate_group is not Evaluator.evaluate_group

    @abstractmethod
    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        """Score one episode. An evaluator that cannot gives an item with an error, or raises."""

    async def evaluate_group(self, items: Sequence[EvalInputItem]) -> list[EvalOutputItem]:
        """Score all episodes of one example, in their order."""
        return list(await asyncio.gather(*(self.evaluate_item(item) for item in items)))


class Dataset(Protocol):
    """Gives the examples of a run."""

    def examples(self) -> list[Example]:
        """All examples, in order. Raises DatasetError when they cannot be read."""


class Run(Protocol):
    """The run that components are built for: an open `etude.store.run_folder.RunFolder`."""

    path: Path
    journal: Any
    """An `etude.store.journal.Journal`."""

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's weights; made when it is first asked for."""


class Progress:
    """Receives the events of a run, in order; subclasses override what they show.

    Methods return at once and never raise. A context manager, for displays that have to be taken down.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def run_started(self, run_id: str, num_epochs: int, facts: Mapping[str, Any]) -> None:
        """A run begins or is resumed; `facts` says on how many examples, with what, and where."""

    def epoch_started(self, epoch: int, num_epochs: int) -> None:
        """An epoch begins; here and below, `epoch` counts from 1."""

    def phase(self, name: str, total: int | None = None) -> None:
        """A phase begins: `validating`, `collecting`, `training`, …; `total` episodes are expected in it."""

    def episode_finished(self, episode: EpisodeRecord) -> None:
        """An episode ended, well or in failure."""

    def scored(self, item: EvalOutputItem) -> None:
        """An episode got its reward, or the reason why there is none."""

    def trained(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """An epoch was trained on; its metrics."""

    def skipped(self, epoch: int, reason: str) -> None:
        """An epoch had nothing to train on."""

    def validated(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """The weights after `epoch` (0: before training) were evaluated on the validation examples."""

    def spent(self, figures: Mapping[str, Any]) -> None:
        """The sums of what the run has taken, about once a second.

        `usd`, `tokens`, and under `limits`, for each limit of its budget by its key, how much of it is used
        and how much it is.
        """

    def message(self, text: str, *, warning: bool = False) -> None:
        """Something that a person should read."""

    def alarm(self, facts: Mapping[str, Any]) -> None:
        """An alarm rings: the fields of an `AlarmEvent`, with `measured`, `epoch`, and `target` where there
        are several. By default its `text` is a message."""
        self.message(str(facts["text"]), warning=True)

    def finished(self, summary: Mapping[str, Any]) -> None:
        """The run is over."""
