"""Grading an answer: a score, those that it is made of, or why there is none."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from etude.core.call import ChatRequest, Completion, Sampling
from etude.core.errors import EngineError, EtudeError
from etude.core.keys import fold
from etude.core.message import Message
from etude.graders.formula import Formula
from etude.graders.judgement import judgement_of
from etude.graders.similarity import METRICS
from etude.graders.spec import (
    GraderSpec,
    JudgeGrader,
    MultiGrader,
    PythonGrader,
    StringCheckGrader,
    TextSimilarityGrader,
    parts_of,
)
from etude.graders.template import GraderError, rendered
from etude.rewards.judge import MATERIAL, Complete, ask_until_usable
from etude.scenarios.sandbox.limits import Limits
from etude.scenarios.sandbox.run import call_function

_ATTEMPTS = 3
"""How often a judge is asked when its answer is malformed."""


@dataclass(frozen=True, slots=True)
class Grade:
    """The score of an answer."""

    score: float
    scores: Mapping[str, float]
    """Those of the single graders, by name."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """That judges took, by model."""


_MOST_COMPARED = 10**11
"""Characters of one text times those of the other: seconds of work."""


def sample_of(text: str, message: Message | None = None) -> dict[str, Any]:
    """The `sample` of templates and programs: an answer's text, that read as JSON, and its tool calls."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    tools = list((message or {}).get("tool_calls") or ())
    return {"output_text": text, "output_json": value, "output_tools": tools}


class Grader:
    """Grades answers by a specification."""

    def __init__(
        self, spec: GraderSpec, judges: Mapping[str, Complete], limits: Limits | None = None
    ) -> None:
        """`judges` has the models of `judges_of(spec)`; `limits` are those of Python programs."""
        self.spec = spec
        self._judges = judges
        self._limits = limits

    async def grade(self, item: Mapping[str, Any], sample: Mapping[str, Any], key: int = 0) -> Grade:
        """Grade a sample, which is like that of `sample_of`; `key` is the seed of judges.

        Raises GraderError when there is no score.
        """
        values, parts, tokens = {"item": item, "sample": sample}, parts_of(self.spec), dict[str, int]()
        grading = [self._part(part, values, fold(key, name), tokens) for name, part in parts.items()]
        results = await asyncio.gather(*grading, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        scores = dict(zip(parts, (score for score in results if isinstance(score, float)), strict=True))
        if not isinstance(self.spec, MultiGrader):
            return Grade(scores[self.spec.name], scores, tokens)
        try:
            value = Formula(self.spec.calculate_output, scores).value(scores)
        except (ArithmeticError, ValueError, RecursionError) as error:
            raise GraderError("other_error", f"the formula has no value at {scores}: {error}") from error
        return Grade(_finite(value, "the formula"), scores, tokens)

    async def _part(self, spec: Any, values: Mapping[str, Any], key: int, tokens: dict[str, int]) -> float:
        match spec:
            case StringCheckGrader():
                return float(_compares(spec, rendered(spec.input, values), rendered(spec.reference, values)))
            case TextSimilarityGrader():
                texts = rendered(spec.input, values), rendered(spec.reference, values)
                if len(texts[0]) * len(texts[1]) > _MOST_COMPARED:
                    lengths = f"{len(texts[0])} and {len(texts[1])} characters"
                    raise GraderError("other_error", f"texts of {lengths} are too long to be compared")
                return await asyncio.to_thread(METRICS[spec.evaluation_metric], *texts)
            case PythonGrader():
                return await self._run(spec, values)
        return await self._judge(spec, values, key, tokens)

    async def _run(self, spec: PythonGrader, values: Mapping[str, Any]) -> float:
        call = [dict(values["sample"]), dict(values["item"])]
        try:
            result = await call_function(spec.source, "grade", [call], limits=self._limits)
        except EtudeError as error:
            raise GraderError("python_grader_server_error", str(error)) from error
        problem = result.returned[0].error if result.returned else result.reason or "it gave no result"
        if problem is not None:
            raise GraderError("python_grader_runtime_error", f"grader '{spec.name}': {problem}")
        return _finite(result.returned[0].value, f"grader '{spec.name}'")

    async def _judge(
        self, spec: JudgeGrader, values: Mapping[str, Any], key: int, tokens: dict[str, int]
    ) -> float:
        params, judgement = spec.sampling_params, judgement_of(spec)
        effort = params.reasoning_effort
        options = {} if effort is None else {"reasoning_effort": effort}
        sampling = Sampling(
            *(params.temperature, params.top_p, params.max_completions_tokens),
            seed=params.seed,
            constraint=judgement.constraint,
        )

        async def complete(request: ChatRequest) -> Completion:
            completion = await self._judges[spec.model](replace(request, template_options=options))
            usage = completion.usage
            used = usage.prompt_tokens + usage.completion_tokens
            tokens[spec.model] = tokens.get(spec.model, 0) + used
            return completion

        try:
            question = _question(spec, values, judgement.words)
            return await ask_until_usable(complete, question, sampling, _ATTEMPTS, judgement.score, key)
        except EngineError as error:
            raise GraderError("model_grader_server_error", f"judge '{spec.model}': {error}") from error
        except GraderError:
            raise
        except EtudeError as error:
            raise GraderError("model_grader_parse_error", f"judge '{spec.model}': {error}") from error


def _question(spec: JudgeGrader, values: Mapping[str, Any], words: str) -> tuple[Message, ...]:
    """The messages of the grader with the form of the answer that is wanted, in a system message."""
    wanted = f"{MATERIAL}\nAnswer with one JSON object and nothing else: {words}"
    messages: list[Message] = [
        {"role": "system" if message.role == "developer" else message.role, "content": text}
        for message in spec.input
        for text in [rendered(message.text, values)]
    ]
    if messages[0]["role"] == "system":
        messages[0]["content"] += f"\n\n{wanted}"
        return tuple(messages)
    return ({"role": "system", "content": wanted}, *messages)


def _compares(spec: StringCheckGrader, text: str, reference: str) -> bool:
    match spec.operation:
        case "eq":
            return text == reference
        case "ne":
            return text != reference
        case "like":
            return reference in text
    return reference.casefold() in text.casefold()


def _finite(value: Any, who: str) -> float:
    is_number = isinstance(value, int | float)
    if not is_number or not math.isfinite(value):
        kind = "python_grader_runtime_error" if who.startswith("grader") else "other_error"
        raise GraderError(kind, f"{who} gave {value!r:.80}; a score is a finite number")  # type: ignore[arg-type]
    return float(value)
