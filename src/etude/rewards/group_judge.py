"""`_type: group_judge`: a model scores the episodes of one example against each other.

The idea is RULER's (OpenPipe, 2025): to rank attempts at the same task is easier than to grade one
by itself, and relative scores within a group are all that GRPO needs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field
from pydantic_core import to_json

from etude.config.registry import register_evaluator
from etude.core.evaluation import EvalInputItem, EvalOutputItem
from etude.core.interfaces import Engine, Evaluator
from etude.core.keys import fold
from etude.rewards.evaluator import scored
from etude.rewards.judge import MATERIAL, JudgeConfig, MalformedAnswer, ask, parse_reasoning, parse_score
from etude.rewards.transcript import common_prefix, messages_of

if TYPE_CHECKING:
    from etude.config.builder import Builder

RUBRIC = """\
An attempt that reaches its goal scores clearly higher than one that does not.
Among attempts that reach it, the one with fewer detours scores higher.
An attempt that gets part of the way may have part of the score.
Where two attempts differ little, so do their scores; where one is much better, so is its score."""


class GroupJudgeConfig(JudgeConfig, name="group_judge"):
    """A model that compares all episodes of an example, and gives each a score in [0, 1]."""

    rubric: str = Field(default=RUBRIC, min_length=1, description="What makes one attempt better.")


class GroupJudge(Evaluator):
    """Scores the episodes of one example in [0, 1] by one model call that sees them all."""

    def __init__(self, config: GroupJudgeConfig, engine: Engine) -> None:
        self._config = config
        self._engine = engine

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        """Judge an episode that has nothing to be compared with."""
        return (await self.evaluate_group([item]))[0]

    async def evaluate_group(self, items: Sequence[EvalInputItem]) -> list[EvalOutputItem]:
        """Judge all episodes of one example. Raises EtudeError when there is no usable judgement."""
        transcripts = [messages_of(item) for item in items]
        # Attempts that say the same are shown once: they cannot be told apart, nor score differently.
        numbers: dict[bytes, int] = {}
        shown: list[list[dict[str, Any]]] = []
        numbered: list[int] = []
        for transcript in transcripts:
            text = to_json(transcript, fallback=str, inf_nan_mode="strings")
            if text not in numbers:
                numbers[text] = len(shown)
                shown.append(transcript)
            numbered.append(numbers[text])
        key = fold(0, "group_judge", items[0].id, *(item.generation for item in items))
        judgements = await ask(
            self._engine,
            self._config,
            system_prompt(self._config),
            material(shown, items[0].expected_output_obj),
            lambda answer: parse_judgements(answer, len(shown)),
            key,
        )
        return [scored(item, judgements[number]) for item, number in zip(items, numbered, strict=True)]


def system_prompt(config: GroupJudgeConfig) -> str:
    """What the judge is told to do."""
    return (
        "You are shown attempts of an AI agent at one task, all with the same goal. Judge what the goal is, "
        f"and score each attempt against the others, from 0 to 1, by this:\n\n{config.rubric.strip()}\n\n"
        f"{MATERIAL}\nAnswer with one JSON object and nothing else, with every attempt in it once: "
        '{"scores": [{"attempt": 1, "reasoning": "one sentence", "score": number}, …]}'
    )


def material(transcripts: Sequence[list[dict[str, Any]]], expected: Any) -> dict[str, Any]:
    """What the judge is shown: what all attempts begin with once, then the rest of each."""
    shared = common_prefix(transcripts) if len(transcripts) > 1 else 0
    shown: dict[str, Any] = {} if expected is None else {"expected": expected}
    if shared:
        shown["beginning_of_all_attempts"] = transcripts[0][:shared]
    shown["attempts"] = [
        {"attempt": number, "messages": transcript[shared:]}
        for number, transcript in enumerate(transcripts, start=1)
    ]
    return shown


def parse_judgements(answer: dict[str, Any], attempts: int) -> list[tuple[float, str]]:
    """Score and reasoning of each attempt. Raises MalformedAnswer unless each is there exactly once."""
    scores = answer.get("scores")
    if not isinstance(scores, list) or not all(isinstance(one, dict) for one in scores):
        raise MalformedAnswer("its 'scores' is not a list of objects")
    found = [one.get("attempt") for one in scores]
    if sorted(map(str, found)) != sorted(map(str, range(1, attempts + 1))):
        raise MalformedAnswer(f"it scores the attempts {found}, and not each of 1 to {attempts} once")
    ordered = sorted(scores, key=lambda one: int(one["attempt"]))
    return [(parse_score(one, 1.0), parse_reasoning(one)) for one in ordered]


@register_evaluator(config_type=GroupJudgeConfig)
async def group_judge(config: GroupJudgeConfig, builder: Builder) -> AsyncIterator[Evaluator]:
    """A model that compares all episodes of an example."""
    yield GroupJudge(config, await builder.get_llm(config.model))
