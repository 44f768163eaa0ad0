"""Whatever an evaluator raises is the reason why there is no score, and ends nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from etude.core.evaluation import EvalInputItem
from etude.rewards.evaluator import as_evaluator
from etude.rewards.scorer import evaluate


class Strange(BaseException):
    """No Exception."""


ERRORS = [
    GeneratorExit(),
    Strange("no Exception"),
    asyncio.CancelledError(),
    SystemExit(0),
    KeyboardInterrupt(),
]


def item() -> EvalInputItem:
    return EvalInputItem(id="x", input_obj={"n": 1}, expected_output_obj=1, output_obj=1)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("waits", [False, True], ids=["in a thread", "on the loop"])
async def test_it_raises_what_would_end_the_run(error: BaseException, waits: bool):
    def score(example: Any, output: Any) -> float:
        raise error

    async def score_later(example: Any, output: Any) -> float:
        raise error

    (output,) = await evaluate(as_evaluator(score_later if waits else score), [item()], 10.0)
    assert output.score is None
    assert output.error
