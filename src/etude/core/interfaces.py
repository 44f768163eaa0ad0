"""The interfaces of the parts of a run, as other parts see them."""

from __future__ import annotations

import asyncio
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from etude.core.call import ChatRequest, Completion
from etude.core.episode import EpisodeRecord, Example
from etude.core.evaluation import EvalInputItem, EvalOutputItem
from etude.core.job import ModelVersion
from etude.core.stats import Bounds


class Engine(Protocol):
    """Samples completions from one model, and adopts new versions of it.

    Engines batch concurrent requests themselves. Callers simply call `complete` many times at once.
    """

    @property
    def version(self) -> int:
        """Number of the model version that the next request will be sampled from."""

    async def complete(self, request: ChatRequest) -> Completion:
        """Sample one assistant message.

        Raises EngineError if there is none: no retries are left, the prompt does not fit, or the endpoint
        refused. Cancelling the call frees its resources.
        """

    async def adopt(self, version: ModelVersion) -> None:
        """Sample from `version` from now on. Adopting the current version again does nothing.

        Raises EngineError if the weights cannot be loaded or their digest differs.
        """

    async def close(self) -> None:
        """Free threads, sockets and memory. A second call does nothing."""


def innermost(engine: Engine) -> Engine:
    """Return the engine itself, without the wrappers that meter its calls."""
    while (inner := getattr(engine, "metered", None)) is not None:
        engine = inner
    return engine


@runtime_checkable
class PortableEngine(Protocol):
    """An engine that only talks to an address. Other processes can build it too, and adopt its versions."""

    adopted: ModelVersion | None
    """The version that was adopted last; None before the first."""


class Evaluator(ABC):
    """Scores episodes. Subclasses that compare the episodes of an example override `evaluate_group` too."""

    timeout: float | None = None
    """Seconds that one evaluation may take; None for the timeout of the evaluation run."""
    bounds: Bounds | None = None
    """The lowest and the highest possible score; None if undeclared. A score outside is an error."""

    @property
    def is_relative(self) -> bool:
        """Whether a score depends on the example's other episodes, so that they must be scored together."""
        return type(self).evaluate_group is not Evaluator.evaluate_group

    @abstractmethod
    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        """Score one episode. If it cannot, return an item with an error, or raise."""

    async def evaluate_group(self, items: Sequence[EvalInputItem]) -> list[EvalOutputItem]:
        """Score all episodes of one example, in their order."""
        return list(await asyncio.gather(*(self.evaluate_item(item) for item in items)))


class Dataset(Protocol):
    """Provides the examples of a run."""

    def examples(self) -> list[Example]:
        """Return all examples, in order. Raises DatasetError if they cannot be read."""


class Run(Protocol):
    """The run that components are built for: an open `etude.store.run_folder.RunFolder`."""

    path: Path
    journal: Any
    """An `etude.store.journal.Journal`."""

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's weights, created on first use."""


class Progress:
    """Receives the events of a run, in order. Subclasses override the methods for the events they show.

    Other events are passed on to `display`, if there is one. Methods return at once and never raise. It is a
    context manager, for displays that must be closed.
    """

    display: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def run_started(self, run_id: str, num_epochs: int, facts: Mapping[str, Any]) -> None:
        """A run starts or resumes. `facts` has the number of examples, the parts, and the place."""

    def epoch_started(self, epoch: int, num_epochs: int) -> None:
        """An epoch begins. Here and below, `epoch` counts from 1."""

    def phase(self, name: str, total: int | None = None) -> None:
        """A phase begins: `validating`, `collecting`, `training`, …; it will run `total` episodes."""

    def episode_finished(self, episode: EpisodeRecord) -> None:
        """An episode ended, with an output or a failure."""

    def scored(self, item: EvalOutputItem) -> None:
        """An episode got its reward, or the reason why there is none."""

    def trained(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """An epoch was trained on, with these metrics."""

    def skipped(self, epoch: int, reason: str) -> None:
        """An epoch had nothing to train on."""

    def validated(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """The weights after `epoch` (0: before training) were evaluated on the validation examples."""

    def spent(self, figures: Mapping[str, Any]) -> None:
        """Report the run's total consumption, about once a second.

        `figures` has `usd` and `tokens`. Under `limits`, it has the amount used and the limit, by the key of
        each budget limit.
        """

    def message(self, text: str, *, warning: bool = False) -> None:
        """Show a text to a person."""

    def alarm(self, facts: Mapping[str, Any]) -> None:
        """An alarm rings. `facts` has the fields of an `AlarmEvent`, and `measured`, `epoch`, and `target` if
        there are several. Without a display, its `text` is a message."""
        if self.display is not None:
            self.display.alarm(facts)
        else:
            self.message(str(facts["text"]), warning=True)

    def finished(self, summary: Mapping[str, Any]) -> None:
        """The run is over."""


def _pass_on(event: Callable[..., None]) -> Callable[..., None]:
    """Make a method pass its event on to the display."""

    @functools.wraps(event)
    def method(self: Progress, *args: Any, **kwargs: Any) -> None:
        if self.display is not None:
            getattr(self.display, event.__name__)(*args, **kwargs)

    return method


for _name, _event in [*vars(Progress).items()]:
    if _name != "alarm" and inspect.isfunction(_event) and not _name.startswith("_"):
        setattr(Progress, _name, _pass_on(_event))
