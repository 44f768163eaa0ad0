"""Evaluators, which score episodes, and the scorer, which runs a run's evaluators and journals their scores.

`@etude.evaluator` and `_type: function` make evaluators from plain functions, `_type: weighted` from others.
`_type: measured` reads scores that the run recorded.
"""

import asyncio
import copy
import inspect
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, TypeVar, overload

from pydantic import Field, FiniteFloat

from etude.config.builder import Builder
from etude.config.component import AgentRef, EvaluatorConfig, ReferenceTo
from etude.config.import_path import import_object, order_by_name, where_defined, where_raised
from etude.config.registry import config_factory, register_evaluator
from etude.core import threads
from etude.core.data_model import name_type, number
from etude.core.episode import EpisodeRecord, Example, recorded_score
from etude.core.errors import EtudeError, RequestError
from etude.core.evaluation import LARGEST_SCORE, EvalInputItem, EvalOutputItem, ScoreBounds, is_score, rising
from etude.core.interfaces import Evaluator
from etude.core.json_text import jsonable
from etude.core.secrets import mask_secrets, masked_data
from etude.core.stats import Bounds
from etude.core.threads import call_any, no_exit, run_apart, stop_tasks
from etude.engines.meter import asking_for
from etude.store.episodes import score_key
from etude.store.journal import Steps

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_MARK = "__etude_evaluator__"
_ROUNDING = 1e-9
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def make_score(item: EvalInputItem, result: Any, bounds: Bounds | None = None) -> EvalOutputItem:
    """Return the score of `item` from the result of an evaluator with these `bounds`.

    Takes any kind of number (see `etude.core.data_model`), a bool, `(score, reasoning)`, or an
    EvalOutputItem, whose own bounds take precedence. Any other result, and a number that is out of bounds or
    cannot be averaged, becomes an error, never a score.
    """
    reasoning: Any = None
    if isinstance(result, EvalOutputItem):
        if result.error is not None:
            return no_score(item, result.error, result.reasoning)
        bounds = result.bounds or bounds
        result, reasoning = result.score, result.reasoning
    elif isinstance(result, tuple) and len(result) == 2:
        result, reasoning = result
    reasoning = masked_data(jsonable(reasoning))
    try:
        score = number(result)
    except ValueError as error:
        return no_score(item, f"the evaluator returned no score: {error}", reasoning)
    if not is_score(score):
        problem = f"{score:g}; a score is finite and within ±{LARGEST_SCORE:g}"
        return no_score(item, f"the evaluator returned {problem}", reasoning)
    low, high = bounds or (score, score)
    if not low - _ROUNDING <= score <= high + _ROUNDING:
        problem = f"the evaluator returned {score:g}, but declares scores from {low:g} to {high:g}"
        return no_score(item, problem, reasoning)
    return EvalOutputItem(
        id=item.id,
        generation=item.generation,
        score=min(max(score, low), high),
        reasoning=reasoning,
        bounds=bounds,
    )


def no_score(item: EvalInputItem, reason: str, reasoning: Any = None) -> EvalOutputItem:
    """Return the output for an episode without a score, with the reason."""
    data = masked_data(jsonable(reasoning))
    return EvalOutputItem(id=item.id, generation=item.generation, error=mask_secrets(reason), reasoning=data)


@overload
def evaluator(fn: FunctionT, /) -> FunctionT: ...


@overload
def evaluator(
    *, name: str | None = None, timeout: float | None = None, bounds: Bounds | None = None
) -> Callable[[FunctionT], FunctionT]: ...


def evaluator(
    fn: FunctionT | None = None,
    /,
    *,
    name: str | None = None,
    timeout: float | None = None,
    bounds: Bounds | None = None,
) -> FunctionT | Callable[[FunctionT], FunctionT]:
    """Mark a function as an evaluator; it stays a function and can be called as before.

    The function takes `(example, output)` or `(example, output, episode)`, may be async, and returns a
    number, a bool or `(score, reasoning)`. `timeout` is in seconds. `bounds` are the lowest and highest score
    that it returns, such as `(-1, 1)`: intervals stay within them. Its signature is checked on use.
    """

    def mark(function: FunctionT) -> FunctionT:
        setattr(function, _MARK, {"name": name, "timeout": timeout, "bounds": bounds})
        return function

    return mark if fn is None else mark(fn)


class FunctionEvaluator(Evaluator):
    """Scores an episode with a function of the example, the output and, if it takes one, the episode.

    A function that is not async runs in its own thread, so it may block.
    """

    def __init__(self, fn: Callable[..., Any], *, arguments: Mapping[str, Any] | None = None) -> None:
        """Raise RequestError if `fn` does not take an example, an output and the `arguments`, and for
        impossible bounds."""
        marked: Any = fn
        while isinstance(marked, partial):  # A partial has neither the name nor the mark of its function.
            marked = marked.func
        mark = getattr(marked, _MARK, {})
        self.name = str(mark.get("name") or getattr(marked, "__name__", type(marked).__name__))
        self.timeout, bounds = mark.get("timeout"), mark.get("bounds")
        try:
            self.bounds = None if bounds is None else rising(bounds)
        except ValueError as error:
            raise RequestError(f"{where_defined(fn)}: the evaluator {self.name}: {error}") from None
        self.fn = fn
        self._arguments = dict(arguments or {})
        names: tuple[str, ...] = ("example", "output")
        try:
            signature = inspect.signature(fn)
            positional = [each for each in signature.parameters.values() if each.kind in _POSITIONAL]
            for each in positional[2:3]:
                is_episode = each.name == "episode" or each.default is inspect.Parameter.empty
                if is_episode and each.name not in self._arguments:
                    names = (*names, "episode")
            signature.bind(*names, **self._arguments)
            self._order = order_by_name(signature, names)
        except (TypeError, ValueError) as error:
            raise RequestError(
                f"{where_defined(fn)}: the evaluator {self.name} cannot be called: {error}. It must take "
                "(example, output) or (example, output, episode), and the 'arguments' of its config"
            ) from error

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        if item.episode is not None:
            example = item.episode.example
        elif isinstance(item.full_dataset_entry, Example):
            example = item.full_dataset_entry
        else:
            inputs = item.input_obj if isinstance(item.input_obj, Mapping) else {"input": item.input_obj}
            example = Example(id=item.id, inputs=inputs, expected=item.expected_output_obj)
        values = {"example": example, "output": item.output_obj, "episode": item.episode}
        given = [values[name] for name in self._order]
        return make_score(item, await call_any(partial(self.fn, *given, **self._arguments)), self.bounds)


def as_evaluator(candidate: Any) -> Evaluator:
    """Return an Evaluator from an Evaluator or a function. Raises RequestError for anything else."""
    is_function = callable(candidate) and not isinstance(candidate, Evaluator | type)
    found = FunctionEvaluator(candidate) if is_function else candidate
    if not isinstance(found, Evaluator):
        raise RequestError(
            f"{candidate!r:.80} is not an evaluator; use a function or an instance of etude.Evaluator"
        )
    seconds: Any = found.timeout
    if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
        raise RequestError(
            f"{where_defined(candidate)}: `timeout` of an evaluator is None or seconds, found {seconds!r:.80}"
        )
    return found


class FunctionEvaluatorConfig(EvaluatorConfig, name="function"):
    """An evaluator that is a Python function: `evaluators: {correct: "my_agent:correct"}`."""

    function: str
    """Import path of the function, `package.module:name`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """More keyword arguments for the function."""


@register_evaluator(config_type=FunctionEvaluatorConfig)
async def function_evaluator(config: FunctionEvaluatorConfig, builder: Builder) -> AsyncIterator[Evaluator]:
    """Build an evaluator from a Python function, an Evaluator, or an Evaluator class in a module."""
    candidate = import_object(config.function)
    if isinstance(candidate, type) and issubclass(candidate, Evaluator):
        yield candidate(**config.arguments)
    elif not isinstance(candidate, Evaluator):
        yield FunctionEvaluator(candidate, arguments=config.arguments)
    elif config.arguments:
        raise RequestError(f"{config.function} is an Evaluator already, and takes no `arguments`")
    else:
        yield candidate


@dataclass(eq=False)
class WeightedEvaluator(Evaluator):
    """The sum of weight times score over its parts. If one part has no score, the sum has none."""

    parts: Mapping[str, Evaluator]
    weights: Mapping[str, float]
    """By the same names as the parts."""

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        scores = await asyncio.gather(*(part.evaluate_item(item) for part in self.parts.values()))
        return self.combine(item, dict(zip(self.parts, scores, strict=True)))

    def combine(self, item: EvalInputItem, scores: Mapping[str, EvalOutputItem]) -> EvalOutputItem:
        """Return the sum of the parts' scores, given by name. Its reasoning is these scores."""
        values: dict[str, float] = {}
        for name in self.weights:
            score = scores[name].score
            if score is None or not scores[name].is_scored:
                return no_score(item, f"no score from '{name}': {scores[name].error}")
            values[name] = score
        try:
            total = math.fsum(weight * values[name] for name, weight in self.weights.items())
        except (OverflowError, ValueError):  # Some terms are infinite, or nearly.
            total = math.nan
        ends = []
        for name, weight in self.weights.items():
            bounds = scores[name].bounds or self.parts[name].bounds
            if bounds is None and weight:
                return make_score(item, (total, values))
            ends.append(sorted(weight * end for end in bounds or (0.0, 0.0)))
        bounds = math.fsum(low for low, _ in ends), math.fsum(high for _, high in ends)
        return make_score(item, (total, values), bounds)


class WeightedEvaluatorConfig(EvaluatorConfig, name="weighted"):
    """A weighted sum of other evaluators' scores."""

    weights: Annotated[dict[str, FiniteFloat], ReferenceTo("evaluators")] = Field(min_length=1)
    """The weights of other entries of `eval.evaluators`, by name."""


@register_evaluator(config_type=WeightedEvaluatorConfig)
async def weighted_evaluator(config: WeightedEvaluatorConfig, builder: Builder) -> AsyncIterator[Evaluator]:
    """Build a weighted sum of other evaluators' scores."""
    parts = {name: as_evaluator(await builder.get_evaluator(name)) for name in config.weights}
    yield WeightedEvaluator(parts, config.weights)


@dataclass(eq=False)
class MeasuredEvaluator(Evaluator):
    """Reads the score that an episode recorded for itself with `episode.score(name, …, agent=…)`.

    An episode without it is left out and counted, like any episode whose evaluator failed.
    """

    name: str
    agent: str | None = None
    bounds: Bounds | None = None

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        """Return the recorded score with its reason, or an error that lists the recorded ones."""
        if item.episode is None:
            return no_score(item, "there is no episode to read a score from")
        event = recorded_score(item.episode, self.name, self.agent)
        if event is not None:
            return make_score(item, (event.value, event.text or None))
        missing = f"'{self.name}'" if self.agent is None else f"'{self.name}' of '{self.agent}'"
        others = ", ".join({event.name: None for event in item.episode.events if event.kind == "score"})
        return no_score(item, f"the episode recorded no score {missing} (it recorded: {others or 'none'})")


class MeasuredConfig(EvaluatorConfig, name="measured"):
    """The score that an episode measured for itself: `episode.score("reward", 0.7)`."""

    name: str = "reward"
    """The name of the score."""
    agent: AgentRef | None = None
    """The agent whose score to use, if each agent has its own."""
    bounds: ScoreBounds | None = None
    """The lowest and the highest possible score, such as `[-1, 1]`."""


register_evaluator(config_type=MeasuredConfig)(
    config_factory(lambda config: MeasuredEvaluator(config.name, config.agent, config.bounds))
)


Scores = dict[str, EvalOutputItem]
"""The scores of one episode, by evaluator."""


@dataclass(eq=False)
class Scorer:
    """Scores episodes that have an output, and never scores one twice.

    A score, or a failure, is kept under `<episode id>/<label>/<evaluator>`. An evaluator that a weighted
    evaluator combines runs only once, even if it is also configured alone. Raises RequestError for two
    evaluators of one name.
    """

    evaluators: Mapping[str, Evaluator]
    journal: Steps
    timeout: float
    """Seconds for one evaluation."""
    max_concurrency: int
    """The number of evaluations that run at once."""
    label: str = "score"

    def __post_init__(self) -> None:
        self.names = tuple(self.evaluators)
        self._slots = asyncio.Semaphore(self.max_concurrency)
        self._single: dict[str, Evaluator] = {}
        self.relative: dict[str, Evaluator] = {}
        """The evaluators that compare the episodes of an example, by name."""
        self._weighted: dict[str, WeightedEvaluator] = {}
        for name, evaluator in self.evaluators.items():
            self._sort_in(name, as_evaluator(evaluator))

    def _sort_in(self, name: str, evaluator: Evaluator) -> None:
        known = {**self._single, **self.relative, **self._weighted}
        if known.get(name, evaluator) is not evaluator:
            raise RequestError(
                f"two evaluators are called '{name}', which a weighted evaluator uses; rename one of them"
            )
        if isinstance(evaluator, WeightedEvaluator):
            for part_name, part in evaluator.parts.items():
                self._sort_in(part_name, part)
            # After its parts, so that one pass in this order finds all parts combined.
            self._weighted[name] = evaluator
        elif evaluator.is_relative:
            self.relative[name] = evaluator
        else:
            self._single[name] = evaluator

    async def score_single(self, item: EvalInputItem) -> Scores:
        """Return the scores of the evaluators that judge each episode alone."""
        scores = await asyncio.gather(*(self._score([item], *named) for named in self._single.items()))
        return {name: outputs[0] for name, outputs in zip(self._single, scores, strict=True)}

    async def score_group(self, items: Sequence[EvalInputItem]) -> list[Scores]:
        """Return the scores of comparing evaluators; `items` are one example's episodes with an output."""
        if not items:
            return []
        scores = await asyncio.gather(*(self._score(items, *named) for named in self.relative.items()))
        return [dict(zip(self.relative, of_one, strict=True)) for of_one in zip(*scores, strict=True)]

    async def combine(self, item: EvalInputItem, scores: Scores) -> Scores:
        """Return the scores of all evaluators, in the order of the config, from the two methods above."""
        scores = dict(scores)
        for name, weighted in self._weighted.items():
            scores[name] = weighted.combine(item, scores)
            await self._keep(item, name, scores[name])
        return {name: scores[name] for name in self.names}

    def missing(self, episode: EpisodeRecord) -> list[str]:
        """Return the evaluators that judge each episode alone and have not scored this one."""
        return [name for name in self._single if read_score(self.journal, episode, name, self.label) is None]

    async def give_up(self, item: EvalInputItem, reason: str) -> None:
        """Store the reason as the failure of each evaluator in `missing`."""
        for name in self.missing(_episode(item)):
            await self._keep(item, name, no_score(item, reason))

    async def _score(
        self, items: Sequence[EvalInputItem], name: str, evaluator: Evaluator
    ) -> list[EvalOutputItem]:
        kept = [read_score(self.journal, _episode(item), name, self.label) for item in items]
        # A comparison covers all items together, so one missing score requires a new comparison.
        complete = [output for output in kept if output is not None]
        if len(complete) == len(items):
            return complete
        async with self._slots:
            began, clock = time.time(), time.perf_counter()
            with asking_for("judge", _episode(items[0]).id):
                outputs = await evaluate(evaluator, items, self.timeout)
            times = {"began": began, "seconds": time.perf_counter() - clock}
        pairs = zip(items, outputs, strict=True)
        await asyncio.gather(*(self._keep(item, name, out, **times) for item, out in pairs))
        return outputs

    async def _keep(self, item: EvalInputItem, name: str, output: EvalOutputItem, **times: float) -> None:
        """Store a score. `times` has the start (`began`) and the `seconds` of the evaluator, if it ran."""
        data: dict[str, Any] = {"score": output.score, "reasoning": output.reasoning, "error": output.error}
        data |= {"bounds": output.bounds} if output.bounds else {}
        data |= times
        await self.journal.put(score_key(_episode(item).id, name, self.label), data)


def read_score(
    journal: Steps, episode: EpisodeRecord, evaluator: str, label: str = "score"
) -> EvalOutputItem | None:
    """Return the score of a stored episode, or None if there is none. Raises StoreError."""
    data = journal.get(score_key(episode.id, evaluator, label))
    if data is None:
        return None
    result = {key: value for key, value in data.items() if key not in ("began", "seconds")}
    return EvalOutputItem(id=episode.example.id, generation=episode.generation, **result)


def _episode(item: EvalInputItem) -> EpisodeRecord:
    assert item.episode is not None, "the score of an item without an episode cannot be stored"
    return item.episode


async def evaluate(
    evaluator: Evaluator, items: Sequence[EvalInputItem], seconds: float
) -> list[EvalOutputItem]:
    """Return one output for each of `items`, in their order, even if the evaluator fails.

    `seconds` is its timeout, unless the evaluator has its own `timeout`.
    """
    seconds = seconds if evaluator.timeout is None else evaluator.timeout
    task = await run_apart(_evaluate(evaluator, items), seconds, threads.GRACE_SECONDS)
    if not task.done():
        await stop_tasks({task}, threads.GRACE_SECONDS)
        reason = f"the evaluator took longer than {seconds:g} s"
    elif task.cancelled():
        reason = "the evaluator cancelled itself"
    elif (error := task.exception()) is None:
        return task.result()
    else:
        reason = str(error) if isinstance(error, EtudeError) else where_raised(error)
    return [no_score(item, reason) for item in items]


async def _evaluate(evaluator: Evaluator, items: Sequence[EvalInputItem]) -> list[EvalOutputItem]:
    """Return the evaluator's outputs. Raises what it raises, and errors for outputs that do not fit."""
    with no_exit("the evaluator"):
        own = [_copy_item(item) for item in items]
        outputs: Sequence[Any]
        if evaluator.is_relative:
            outputs = await call_any(partial(evaluator.evaluate_group, own))
        else:
            outputs = [await call_any(partial(evaluator.evaluate_item, item)) for item in own]
        if not isinstance(outputs, Sequence) or isinstance(outputs, str):
            raise TypeError(f"evaluate_group returned {name_type(outputs)}; return a list of scores")
        if len(outputs) != len(items):
            raise ValueError(f"evaluate_group returned {len(outputs)} scores for {len(items)} episodes")
        for item, output in zip(items, outputs, strict=True):
            is_named = isinstance(output, EvalOutputItem) and "generation" in output.model_fields_set
            if len(items) > 1 and is_named and output.generation != item.generation:
                raise ValueError(
                    f"evaluate_group returned generation {output.generation} instead of {item.generation}; "
                    "return the scores in the order of the items"
                )
        return [make_score(*pair, evaluator.bounds) for pair in zip(items, outputs, strict=True)]


def _copy_item(item: EvalInputItem) -> EvalInputItem:
    """Copy the item for one evaluator, so that its changes reach neither the record nor other evaluators."""
    output, record = copy.deepcopy(item.output_obj), item.episode
    changes: dict[str, Any] = {"output_obj": output}
    if record is not None:
        example = record.example.copy()
        changes["episode"] = replace(record, example=example, output=output)
        if item.full_dataset_entry is record.example:
            changes |= {"full_dataset_entry": example, "input_obj": example.inputs}
    return item.model_copy(update=changes)
