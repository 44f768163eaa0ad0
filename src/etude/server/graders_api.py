"""`/v1/fine_tuning/alpha/graders`: trying graders out, and the server's models as their judges."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, get_args

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from etude.core.call import ChatRequest, Completion
from etude.graders.grader import Grade, Grader, sample_of
from etude.graders.spec import GraderSpec, judges_of
from etude.graders.template import GraderError, Problem
from etude.rewards.judge import Complete
from etude.server.engines import EnginePool
from etude.server.json_route import JsonRoute
from etude.server.models import ModelStore
from etude.wire.api_error import ApiError

_NEVER = ("model_grader_refusal_error", "truncated_observation_error", "unresponsive_reward_error")
"""Errors of OpenAI's that cannot happen here."""


class ValidateBody(BaseModel):
    """A grader."""

    model_config = ConfigDict(extra="forbid")

    grader: GraderSpec


class RunBody(ValidateBody):
    """A grader, and an answer to grade."""

    model_sample: str = Field(description="The answer: `sample.output_text`, and as JSON `output_json`.")
    item: dict[str, Any] = Field(default_factory=dict, description="The row that it answers: `item`.")


def grader_routes(models: ModelStore, pool: EnginePool) -> APIRouter:
    """Run and check graders."""
    router = APIRouter(prefix="/v1/fine_tuning/alpha/graders", tags=["graders"], route_class=JsonRoute)

    @router.post("/run", summary="Grade an answer")
    async def run_grader(body: RunBody) -> dict[str, Any]:
        """The reward. Where there is none, it is 0, and `metadata.errors` says why."""
        require_judges(models, body.grader, "grader")
        grader = Grader(body.grader, {name: _judge(pool, name) for name in judges_of(body.grader)})
        start = time.perf_counter()
        try:
            outcome: Grade | GraderError = await grader.grade(body.item, sample_of(body.model_sample))
        except GraderError as error:
            outcome = error
        return _result(body.grader, outcome, time.perf_counter() - start)

    @router.post("/validate", summary="Check a grader")
    def validate_grader(body: ValidateBody) -> dict[str, Any]:
        """The grader as it is understood; 400 for one that cannot work."""
        require_judges(models, body.grader, "grader")
        return {"grader": body.grader.model_dump(mode="json", exclude_none=True)}

    return router


def require_judges(models: ModelStore, grader: Any, param: str) -> None:
    """Raise ApiError 400 for a judge that the server does not have."""
    for name in sorted(judges_of(grader)):
        try:
            models.get(name)
        except ApiError as error:
            message = f"the judge {name!r} is no model of this server"
            raise ApiError(400, message, param=param, code="model_not_found") from error


def _judge(pool: EnginePool, name: str) -> Complete:
    """Answers of a model of the server."""

    async def complete(request: ChatRequest) -> Completion:
        async with pool.using(name, 1) as engine:
            return await engine.complete(request)

    return complete


def _result(grader: Any, outcome: Grade | GraderError, seconds: float) -> dict[str, Any]:
    failed = outcome if isinstance(outcome, GraderError) else None
    scores: Mapping[str, float] = {} if isinstance(outcome, GraderError) else outcome.scores
    tokens: Mapping[str, int] = {} if isinstance(outcome, GraderError) else outcome.tokens
    problem = None if failed is None else failed.problem
    errors: dict[str, Any] = {name: name == problem for name in (*get_args(Problem), *_NEVER)}
    details = {"python_grader_runtime_error", "model_grader_server_error"}
    errors |= {f"{name}_details": str(failed) if name == problem else None for name in details}
    errors["python_grader_server_error_type"] = None
    errors["message"] = None if failed is None else str(failed)
    return {
        "reward": 0.0 if isinstance(outcome, GraderError) else outcome.score,
        "sub_rewards": dict(scores),
        "model_grader_token_usage_per_model": dict(tokens),
        "metadata": {
            "name": grader.name,
            "type": grader.type,
            "scores": dict(scores),
            "errors": errors,
            "execution_time": seconds,
            "token_usage": sum(tokens.values()) or None,
            "sampled_model_name": None,
        },
    }
