"""Asking an evaluator, whoever wrote it, for scores."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic_core import from_json, to_json

from etude.config.import_path import where_raised
from etude.core.data_model import kind_of, number
from etude.core.errors import EtudeError
from etude.core.evaluation import EvalInputItem, EvalOutputItem
from etude.core.interfaces import Evaluator
from etude.store.plain import plain


def scored(item: EvalInputItem, result: Any) -> EvalOutputItem:
    """What an evaluator returned, as the score of `item`.

    Takes a number of any kind (see `etude.core.data_model`), a bool, `(score, reasoning)`, or an
    EvalOutputItem. Whatever is not a finite number becomes an error, never a score.
    """
    reasoning: Any = None
    if isinstance(result, EvalOutputItem):
        if result.error is not None:
            return unscored(item, result.error, result.reasoning)
        result, reasoning = result.score, result.reasoning
    elif isinstance(result, tuple) and len(result) == 2:
        result, reasoning = result
    reasoning = jsonable(reasoning)
    try:
        score = number(result)
    except ValueError:
        return unscored(item, f"the evaluator returned {kind_of(result)}; a score is a number", reasoning)
    if not math.isfinite(score):
        return unscored(item, f"the evaluator returned {score}; a score is a finite number", reasoning)
    return EvalOutputItem(id=item.id, generation=item.generation, score=score, reasoning=reasoning)


def unscored(item: EvalInputItem, reason: str, reasoning: Any = None) -> EvalOutputItem:
    """The output for an episode that has no score, and why."""
    return EvalOutputItem(id=item.id, generation=item.generation, error=reason, reasoning=jsonable(reasoning))


async def evaluate(
    evaluator: Evaluator, items: Sequence[EvalInputItem], seconds: float
) -> list[EvalOutputItem]:
    """The outputs of an evaluator for `items`, whatever it does: an output for each, in their order.

    `seconds` is how long it may take, unless the evaluator has its own `timeout`.
    """
    seconds = seconds if evaluator.timeout is None else evaluator.timeout
    try:
        own = [_own(item) for item in items]
        async with asyncio.timeout(seconds) as limit:
            if evaluator.is_relative:
                outputs = await evaluator.evaluate_group(own)
            else:
                outputs = [await evaluator.evaluate_item(item) for item in own]
        if not isinstance(outputs, Sequence) or isinstance(outputs, str):
            raise TypeError(f"evaluate_group returned {kind_of(outputs)}; return a list, a score an episode")
        if len(outputs) != len(items):
            raise ValueError(f"{len(outputs)} scores for {len(items)} episodes")
        return [scored(item, output) for item, output in zip(items, _in_order(items, outputs), strict=True)]
    except EtudeError as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - evaluators are user code and may raise anything
        late = isinstance(error, TimeoutError) and limit.expired()
        reason = f"the evaluator took longer than {seconds:g} s" if late else where_raised(error)
    return [unscored(item, reason) for item in items]


def _in_order(items: Sequence[EvalInputItem], outputs: Sequence[Any]) -> Sequence[Any]:
    """The outputs in the order of the items, by their generations where they say them.

    Raises ValueError for generations that are not those of the items.
    """
    if len(items) == 1 or not any(_says_generation(output) for output in outputs):
        return outputs
    wanted = [item.generation for item in items]
    given = [output.generation if _says_generation(output) else None for output in outputs]
    if sorted(wanted) != sorted(-1 if one is None else one for one in given):
        raise ValueError(f"the evaluator returned scores of the generations {given}, asked about {wanted}")
    return [outputs[given.index(generation)] for generation in wanted]


def _says_generation(output: Any) -> bool:
    return isinstance(output, EvalOutputItem) and "generation" in output.model_fields_set


def _own(item: EvalInputItem) -> EvalInputItem:
    """A copy for one evaluator: what it assigns or changes reaches neither the record nor the others."""
    output, record = copy.deepcopy(item.output_obj), item.episode
    changes: dict[str, Any] = {"output_obj": output}
    if record is not None:
        example = replace(record.example, inputs=dict(record.example.inputs))
        changes["episode"] = replace(record, example=example, output=output)
        if item.full_dataset_entry is record.example:
            changes |= {"full_dataset_entry": example, "input_obj": example.inputs}
    return item.model_copy(update=changes)


def jsonable(value: Any) -> Any:
    """A reasoning as JSON keeps it, so that a resumed run sees what the first one saw."""
    if value is None or isinstance(value, str):
        return value
    try:
        return from_json(to_json(value, fallback=_plain_or_text, inf_nan_mode="strings"))
    except ValueError:
        # Bytes that are no text, or a structure that holds itself.
        return str(value)


def _plain_or_text(value: Any) -> Any:
    """Numbers and arrays of other libraries as they are; what has no JSON as its text."""
    try:
        return plain(value)
    except TypeError:
        return str(value)
