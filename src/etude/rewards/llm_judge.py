"""`_type: llm_judge`: a model scores one episode by what its prompt asks for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from pydantic import Field

from etude.config.registry import register_evaluator
from etude.core.evaluation import EvalInputItem, EvalOutputItem
from etude.core.interfaces import Engine, Evaluator
from etude.core.keys import fold
from etude.rewards.evaluator import scored
from etude.rewards.judge import MATERIAL, JudgeConfig, ask, parse_reasoning, parse_score
from etude.rewards.transcript import messages_of

if TYPE_CHECKING:
    from etude.config.builder import Builder


class LlmJudgeConfig(JudgeConfig, name="llm_judge"):
    """A model that scores each episode by itself. The score is the judge's grade divided by `scale`."""

    prompt: str = Field(min_length=1, description="What to judge by, in words.")
    scale: float = Field(default=10, gt=0, description="The best grade; the worst is 0.")
    transcript: bool = Field(
        default=False, description="Show the judge the whole conversation, and not the output alone."
    )


class LlmJudge(Evaluator):
    """Scores an episode in [0, 1] by a model's grade."""

    def __init__(self, config: LlmJudgeConfig, engine: Engine) -> None:
        self._config = config
        self._engine = engine

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        """Ask the judge. Raises EtudeError when it gives no usable grade."""
        key = fold(0, "llm_judge", item.id, item.generation)
        score, reasoning = await ask(
            self._engine, self._config, system_prompt(self._config), self._material(item), self._parse, key
        )
        return scored(item, (score, reasoning))

    def _material(self, item: EvalInputItem) -> dict[str, Any]:
        material: dict[str, Any] = {"task": item.input_obj}
        if item.expected_output_obj is not None:
            material["expected"] = item.expected_output_obj
        if self._config.transcript:
            material["transcript"] = messages_of(item)
        return material | {"output": item.output_obj}

    def _parse(self, answer: dict[str, Any]) -> tuple[float, str]:
        scale = self._config.scale
        return parse_score(answer, scale) / scale, parse_reasoning(answer)


def system_prompt(config: LlmJudgeConfig) -> str:
    """What the judge is told to do."""
    return (
        f"You judge the work of an AI agent by this:\n\n{config.prompt.strip()}\n\n"
        f"Give a score from 0 (worst) to {config.scale:g} (best). {MATERIAL}\n"
        'Answer with one JSON object and nothing else: {"reasoning": "one or two sentences", "score": number}'
    )


@register_evaluator(config_type=LlmJudgeConfig)
async def llm_judge(config: LlmJudgeConfig, builder: Builder) -> AsyncIterator[Evaluator]:
    """A model that scores each episode by itself."""
    yield LlmJudge(config, await builder.get_llm(config.model))
