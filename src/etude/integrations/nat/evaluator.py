"""The evaluators of a toolkit config as evaluators here: `_type: nat`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from pydantic import Field

from etude.config.component import EvaluatorConfig
from etude.config.registry import register_evaluator
from etude.core.interfaces import Evaluator
from etude.integrations.nat.workflow import agent_of

if TYPE_CHECKING:
    from etude.config.builder import Builder


class NatEvaluatorConfig(EvaluatorConfig, name="nat"):
    """An entry of `eval.evaluators` in the toolkit config of the workflow."""

    evaluator: str = Field(description="Its name there.")


@register_evaluator(config_type=NatEvaluatorConfig)
async def nat_evaluator(config: NatEvaluatorConfig, builder: Builder) -> AsyncIterator[Evaluator]:
    """Raises RequestError when the workflow is not the toolkit's, or its config has no such evaluator."""
    agent = await agent_of(builder)
    from etude.integrations.nat.scoring import NatEvaluator

    yield NatEvaluator(agent, config.evaluator)
