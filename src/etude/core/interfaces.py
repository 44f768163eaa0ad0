"""The interfaces of the parts of a run, as other parts see them, and checks of what implementations return.

If an implementation, also a user's, returns a value that its interface does not declare, an error names the
method, its line and the value. Parts call many of these methods themselves, where no wrapper sees them.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import re
import sys
import time
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import (
    Any,
    Literal,
    Protocol,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    runtime_checkable,
)

from pydantic import BaseModel

from etude.core.call import ChatRequest, Completion
from etude.core.data_model import name_type, number
from etude.core.episode import EpisodeRecord, Example
from etude.core.errors import EtudeError, RequestError
from etude.core.evaluation import EvalInputItem, EvalOutputItem
from etude.core.job import ModelVersion
from etude.core.stats import Bounds
from etude.core.threads import no_exit

C = TypeVar("C", bound=Callable[..., Any])


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


class Totals(BaseModel):
    """Counts since the head began. They include episodes read back from the journal."""

    finished: int = 0
    failed: int = 0
    calls: int = 0
    completion_tokens: int = 0


class ProgressSums(Progress):
    """The sums of a run's events so far. Displays are subclasses that show them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, display: Progress | None = None) -> None:
        """Pass each event on to `display`."""
        self.clock = clock
        self.started = clock()
        self.epoch: int | None = None
        """Counts from 1; None before the first epoch."""
        self.num_epochs = 0
        self.totals = Totals()
        ProgressSums.phase(self, "starting")
        self.display = display  # After the first phase, which is no event of a run.

    def run_started(self, run_id: str, num_epochs: int, facts: Mapping[str, Any]) -> None:
        self.num_epochs = num_epochs
        super().run_started(run_id, num_epochs, facts)

    def epoch_started(self, epoch: int, num_epochs: int) -> None:
        self.epoch, self.num_epochs = epoch, num_epochs
        super().epoch_started(epoch, num_epochs)

    def phase(self, name: str, total: int | None = None) -> None:
        self.phase_name, self.phase_total = name, total
        self.phase_started = self.clock()
        self.episodes = self.failures = self.tokens = 0
        super().phase(name, total)

    def episode_finished(self, episode: EpisodeRecord) -> None:
        failed, tokens = episode.failure is not None, episode.usage.completion_tokens
        self.episodes += 1
        self.failures += failed
        self.tokens += tokens
        self.totals.finished += 1
        self.totals.failed += failed
        self.totals.calls += len(episode.calls)
        self.totals.completion_tokens += tokens
        super().episode_finished(episode)


def wrap_implementations(cls: type, *interfaces: type) -> None:
    """Wrap the methods that `cls` itself defines and the first of the interfaces declares, so that results
    are checked. Etude's own classes are left as they are. Raises RequestError for an `async def` where the
    interface's method is not awaited."""
    if cls.__module__.startswith("etude."):
        return  # mypy checks these.
    methods = {name: method for interface in reversed(interfaces) for name, method in vars(interface).items()}
    for name, declared in methods.items():
        own = vars(cls).get(name)
        is_method = inspect.isfunction(declared) and not name.startswith("_")
        if is_method and own is not None and not (callable(own) or isinstance(own, classmethod)):
            raise RequestError(f"{cls.__name__}.{name} must be a method: `def {name}(self, …)`")
        if is_method and inspect.isfunction(own) and not getattr(own, "__isabstractmethod__", False):
            setattr(cls, name, _wrap_method(own, declared))


def _wrap_method(own: C, declared: Callable[..., Any]) -> C:
    """Return `own` with checks. It is async if `declared` is, even if `own` is a plain `def`."""
    is_awaited = inspect.iscoroutinefunction(declared)
    if inspect.iscoroutinefunction(own) and not is_awaited:
        raise RequestError(
            f"{find_place(own)} is `async def`, and {declared.__qualname__} is not awaited; "
            "write `def`, and await nothing in it"
        )

    @functools.wraps(own)
    def call_and_check(self: Any, *args: Any, **kwargs: Any) -> Any:
        with no_exit(find_place(own), SystemExit):
            return check_return(own(self, *args, **kwargs), own, declared)

    @functools.wraps(own)
    async def call_and_check_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        with no_exit(find_place(own), SystemExit):
            value = own(self, *args, **kwargs)
            return check_return(await value if inspect.isawaitable(value) else value, own, declared)

    # The wrappers have the signature of `own`.
    return call_and_check_async if is_awaited else call_and_check  # type: ignore[return-value]


class WrongReturnError(EtudeError):
    """A user's part returned a value that its interface does not declare.

    It is no TrainingError, because the job that it concerns may still be running.
    """


def check_return(value: Any, implementation: Callable[..., Any], declared: Callable[..., Any]) -> Any:
    """Return `value` if it has the type that `declared` returns; any kind of number as a float. Raises
    WrongReturnError. If `declared` returns None, any value but an awaitable is accepted."""
    expected = _declared_return(inspect.unwrap(declared))
    if expected is types.NoneType and not inspect.isawaitable(value):
        return value
    if _fits(value, expected):
        return number(value) if expected is float else value
    if inspect.iscoroutine(value):
        value.close()
    shown = "None" if value is None else f"{name_type(value)} ({value!r:.60})"
    missing = " (is a `return` missing?)" if value is None else ""
    is_class = isinstance(expected, type) and not get_args(expected)
    # As written in code, without modules: `TrainingJobRef | Skipped`.
    written = re.sub(r"(?:\w+\.)+|(?<=None)Type", "", expected.__name__ if is_class else str(expected))
    raise WrongReturnError(
        f"{find_place(implementation)} returned {shown}, and `{written}` is expected{missing}"
    )


@functools.cache
def _declared_return(method: Callable[..., Any]) -> Any:
    # Only the return type is resolved, because parameter types may be imported for type checkers only.
    # If the return type is too, it is looked up in the loaded modules, and else nothing is checked.
    written = types.SimpleNamespace(__annotations__={"return": method.__annotations__.get("return", Any)})
    try:
        return get_type_hints(written, {**sys.modules, **method.__globals__})["return"]
    except NameError:
        return Any


def _fits(value: Any, expected: Any, finite: bool = True) -> bool:
    if expected is Any:
        return True
    if get_origin(expected) in (Union, types.UnionType):
        return any(_fits(value, each) for each in get_args(expected))
    if get_origin(expected) in (list, Sequence):
        if hasattr(value, "ndim"):
            return bool(value.ndim)  # Arrays of numpy or torch.
        (item,) = get_args(expected)
        is_list = isinstance(value, (list, tuple) if get_origin(expected) is list else Sequence)
        return is_list and not isinstance(value, str) and all(_fits(each, item) for each in value)
    if get_origin(expected) is tuple:
        items = get_args(expected)
        is_tuple = isinstance(value, tuple | list) and len(value) == len(items)
        return is_tuple and all(map(_fits, value, items))
    if get_origin(expected) is set:
        return isinstance(value, Set) and all(_fits(each, *get_args(expected)) for each in value)
    if get_origin(expected) is dict:
        is_dict, item = isinstance(value, dict), get_args(expected)[1]
        return is_dict and all(_fits(each, item, finite=False) for each in value.values())
    if get_origin(expected) is Literal:
        return value in get_args(expected)
    if expected is float:
        try:
            return math.isfinite(number(value)) or not finite
        except ValueError:
            return False
    if expected is bool and getattr(value, "ndim", None) == 0:
        value = value.item()  # Scalars of numpy or torch.
    return isinstance(value, get_origin(expected) or expected)


def find_place(method: Callable[..., Any]) -> str:
    """Return the place of a method: `parts.py:12: Mine.submit`."""
    name = getattr(method, "__qualname__", repr(method)).rpartition("<locals>.")[2]
    code = getattr(inspect.unwrap(method), "__code__", None)
    return name if code is None else f"{Path(code.co_filename).name}:{code.co_firstlineno}: {name}"
